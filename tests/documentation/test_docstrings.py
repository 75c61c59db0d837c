"""Every public name says what it does to privacy and shows an example (that pytest runs)."""

import importlib
import inspect
import pkgutil

import pytest

import dpopt

# Rooms and modules that other modules of dpopt call and users do not.
INTERNAL_MODULES = {
    *("dpopt.common", "dpopt.composition", "dpopt.engines", "dpopt.ghost.", "dpopt.normals"),
    *("dpopt.run.data", "dpopt.run.journal_file"),
}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(dpopt.__path__, "dpopt.")
    if not any(part.startswith("_") for part in module.name.split("."))
    and not module.name.startswith(tuple(INTERNAL_MODULES))
)


# What other modules of dpopt call and users do not.
INTERNAL = {
    "check_order",
    "privacy_of_stages",
    "check_unit",
    "inspect_optimizer",
    "inspect_once",
    "inspect_update",
    "check_arguments",
    "apply_diagonal",
    "as_promise",
    "as_clip_function",
    "is_adaptive",
    "fixed_scale",
    "verify_once",
}


def public_names():
    """Functions and classes that a public module defines, and whatever dpopt itself exports."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            is_public = not key.startswith("_") and getattr(value, "__module__", None) == name
            if is_public and key not in INTERNAL and (inspect.isfunction(value) or inspect.isclass(value)):
                found[f"{name}.{key}"] = value
    exported = [getattr(dpopt, key) for key in dir(dpopt) if not key.startswith("_")]
    found.update({f"{v.__module__}.{v.__qualname__}": v for v in exported if callable(v)})
    return found


PUBLIC = public_names()
EXPORTED = {id(getattr(dpopt, key)) for key in dir(dpopt) if not key.startswith("_")}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name):
    assert (importlib.import_module(name).__doc__ or "").strip()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name):
    doc = vars(PUBLIC[name]).get("__doc__") if inspect.isclass(PUBLIC[name]) else PUBLIC[name].__doc__
    assert doc and doc.strip()
    assert not doc.startswith(PUBLIC[name].__name__ + "("), "a docstring that Python made itself says nothing"


@pytest.mark.parametrize("name", [n for n in PUBLIC if id(PUBLIC[n]) in EXPORTED])
def test_every_entry_point_states_its_privacy_and_shows_an_example(name):
    doc = inspect.getdoc(PUBLIC[name])
    assert "*Privacy*" in doc
    assert ">>> " in doc or name in WITHOUT_EXAMPLE


WITHOUT_EXAMPLE = {
    "dpopt.gradients.PerExampleGrads",  # made by per_example_grads, which shows it
    "dpopt.run.training.SensitiveMetrics",  # likewise by make_train_step
}


def test_the_promised_names_exist():
    missing = [
        name
        for name in (
            "per_example_grads clip_and_sum add_gaussian_noise normalize_by precondition_by_side_information dp_sgd "
            "dp_adam dp_adamw dp_rmsprop dp_adagrad dp_yogi make_train_step PoissonSampler epsilon calibrate"
        ).split()
        if not callable(getattr(dpopt, name, None))
    ]
    assert not missing and callable(dpopt.noise.standard_normal_like)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("per_example_grads", "(loss_fn, *, engine, microbatch_size, has_aux, memory)"),
        ("clip_and_sum", "(l2_clip_norm)"),
        ("add_gaussian_noise", "(noise_stddev, key)"),
        ("normalize_by", "(expected_batch_size)"),
        ("make_train_step", "(loss_fn, optimizer, *, microbatch_size, engine, has_aux)"),
        ("epsilon", "(*, noise_multiplier, sampling_prob, steps, delta, accountant)"),
        ("calibrate", "(*, epsilon, delta, sampling_prob, steps, accountant)"),
    ],
)
def test_promised_signatures_hold(function, expected):
    parameters = inspect.signature(getattr(dpopt, function)).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == expected
