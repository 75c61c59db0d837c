"""Every import path of version 0.1 that has moved still works, with a warning that names the new one."""

import importlib
import subprocess
import sys

import pytest

import dpopt
from dpopt import _moved


@pytest.mark.parametrize("old", _moved.MOVED)
def test_a_moved_module_is_the_module_itself(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved: {_moved.MOVED[old]}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(_moved.MOVED[old])


@pytest.mark.parametrize("old", _moved.NAMES)
def test_a_moved_name_is_the_object_itself(old):
    module, _, name = old.rpartition(".")
    before = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved: {_moved.NAMES[old]}.{name}"):
        found = getattr(before, name)
    place = _moved.NAMES[old]
    assert found is getattr(importlib.import_module(_moved.MOVED.get(place, place)), name)
    assert name not in vars(before), "a name that has moved must not be kept: it would hide the warning"


# Names that left a module which still offers them: where they are now.
OFFERED = {
    "dpopt.events.flattened": "dpopt.composition.flattened",
    "dpopt.events.flattened_both_ways": "dpopt.composition.flattened",
    "dpopt.events.merged": "dpopt.composition.flattened",
    "dpopt.privacy.Relation": "dpopt.composition.relation",
    "dpopt.optimizers.dp2.scale_by_phase_learning_rate": "dpopt.optimizers._phases",
    "dpopt.run.identity.Segment": "dpopt.run.state",
    "dpopt.run.identity.TrainState": "dpopt.run.state",
    "dpopt.run.results.Evaluation": "dpopt.run._monitor",
}


@pytest.mark.parametrize("old", OFFERED)
def test_a_name_can_be_imported_from_where_it_was(old):
    module, _, name = old.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(OFFERED[old]), name) and found.__module__ == OFFERED[old]


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="'dpopt' has no attribute 'dp_sdg'"):
        _ = dpopt.dp_sdg
    with pytest.raises(AttributeError, match=r"'dpopt\.events' has no attribute 'privacy_events'"):
        _ = dpopt.events.privacy_events
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dpopt.optimizer")


@pytest.mark.slow
def test_old_paths_work_before_new_ones_are_imported():
    code = "import dpopt.checkpoint as c, dpopt.preconditioning as p; print(c.Checkpointer, p.precondition)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "dpopt.run.checkpoint.Checkpointer" in done.stdout, done.stderr
