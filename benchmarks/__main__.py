"""The command line of the benchmarks."""

import argparse
from pathlib import Path

from benchmarks import records


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of dpopt.")
    commands = parser.add_subparsers(dest="command", required=True)
    quickstart = commands.add_parser("quickstart", help="digits, small CNN, with and without privacy (minutes)")
    quickstart.add_argument("--seeds", type=int, default=3, help="runs per setting (default 3)")
    quickstart.add_argument("--out", type=Path, default=records.LOCAL, help="folder for JSON and plot")
    speed = commands.add_parser("speed", help="the clipped gradient against the ordinary one (minutes)")
    speed.add_argument("--only", help="part of a family's name")
    speed.add_argument(
        "--others", action="store_true", help="also time optax.contrib and jax_privacy (and Opacus, if installed)"
    )
    speed.add_argument("--quick", action="store_true", help="do not time vmap; what the JSON has of it stays")
    speed.add_argument("--seconds", type=float, default=20.0, help="time to spend on each family (default 20)")
    speed.add_argument("--out", type=Path, default=records.LOCAL, help="folder for JSON and plot")
    zoo = commands.add_parser("zoo", help="a clipped gradient's time and memory on models of all kinds (an hour)")
    zoo.add_argument("--only", help="part of a model's name")
    zoo.add_argument("--seconds", type=float, default=10.0, help="time to spend on each model (default 10)")
    zoo.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    noise = commands.add_parser("noise", help="a draw of noise against JAX's own normals (a minute)")
    noise.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    memory = commands.add_parser("memory", help="its peak memory against the ordinary one's (minutes)")
    memory.add_argument("--only", help="part of a family's name")
    memory.add_argument("--others", action="store_true", help="also optax.contrib and jax_privacy, if installed")
    memory.add_argument("--resume", action="store_true", help="only what the JSON in the folder does not have yet")
    memory.add_argument("--out", type=Path, default=records.LOCAL, help="folder for JSON and plot")
    opacus = commands.add_parser("opacus", help="Opacus against torch's ordinary gradient, where both are installed")
    opacus.add_argument("--only", help="part of a model's name")
    opacus.add_argument("--seconds", type=float, default=20.0, help="time to spend on each model (default 20)")
    opacus.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    imdb = commands.add_parser("imdb-speed", help="a full private run on IMDB, and other engines beside it (minutes)")
    imdb.add_argument("--steps", type=int, default=39_000, help="of the closed form (default 39000: 100 epochs)")
    imdb.add_argument("--engine-steps", type=int, default=2_000, help="of dpopt's engines (default 2000, scaled up)")
    imdb.add_argument("--checked-steps", type=int, default=200, help="after which all must agree (default 200)")
    imdb.add_argument("--data", type=Path, help="folder with the data sets (default: DPOPT_DATA, then ./data)")
    imdb.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    utility = commands.add_parser("utility", help="the papers' tables on real data, and what beats them (hours)")
    suites = ("papers", "frontier", "epochs", "others", "pretrained", "all")
    utility.add_argument("--suite", choices=suites, help="(default papers; frontier with --optimizer)")
    utility.add_argument("--optimizer", help="yours, beside the recorded rows: path/to/module.py:function")
    utility.add_argument(
        "--rates", nargs="+", default=[], help="where its learning rates start: 0.1, or imdb=15 digits=0.25"
    )
    utility.add_argument("--only", help="part of the name of a table or row")
    utility.add_argument("--epsilon", type=float, action="append", help="only this one, but for papers (repeatable)")
    utility.add_argument("--seeds", type=int, default=5, help="runs of every setting (default 5)")
    utility.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    utility.add_argument("--together", type=int, default=1, help="seeds in one program, under vmap (default 1)")
    utility.add_argument("--data", type=Path, help="folder with the data sets (default: DPOPT_DATA, then ./data)")
    utility.add_argument("--out", type=Path, default=records.LOCAL, help="folder for records, tables and plots")
    tuning = commands.add_parser("tuning", help="what tuning costs on IMDB, unpaid and paid for (minutes)")
    tuning.add_argument("--seeds", type=int, default=5, help="of every way and epsilon (default 5)")
    tuning.add_argument("--data", type=Path, help="folder with the data sets (default: DPOPT_DATA, then ./data)")
    tuning.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    lstm = commands.add_parser("lstm", help="DP-SGD on IMDB with an LSTM: what was tried (half an hour)")
    lstm.add_argument("--data", type=Path, help="folder with the data sets (default: DPOPT_DATA, then ./data)")
    lstm.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON; what it has is kept")
    scaling = commands.add_parser(
        "scaling", help="time and memory of a step as batch, model and sequence grow (minutes)"
    )
    scaling.add_argument("--devices", type=int, help="only the growth with devices, up to so many (simulated)")
    scaling.add_argument("--llm", action="store_true", help="language models on many devices, compiled and not run")
    scaling.add_argument(
        "--size", action="append", help="with --llm: only 1.7, 7 or 30 billion parameters (repeatable)"
    )
    scaling.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    audit = commands.add_parser("audit", help="lower bounds on epsilon by attack, of sound and broken builds (minutes)")
    audit.add_argument("--only", help="part of an optimizer's name")
    parts = ("optimizers", "pipeline", "correlated", "adaptive", "sparse", "rows", "tuning")
    audit.add_argument("--part", action="append", choices=parts, help="(repeatable)")
    audit.add_argument("--canaries", type=int, default=2_000, help="canaries of the one large run (default 2000)")
    audit.add_argument("--runs", type=int, default=8_000, help="small runs with one canary each (default 8000)")
    audit.add_argument("--pipeline-runs", type=int, default=6_000, help="runs of the whole pipeline (default 6000)")
    audit.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    by_user = commands.add_parser("users", help="MovieLens with privacy for a user and for a rating (minutes)")
    by_user.add_argument("--seeds", type=int, default=3, help="seeds of every row (default 3)")
    by_user.add_argument("--data", type=Path, help="folder with the data sets (default: DPOPT_DATA, then ./data)")
    by_user.add_argument("--out", type=Path, default=records.LOCAL, help="folder for the JSON")
    report = commands.add_parser("report", help="writes RESULTS.md, its plots, and the figures of README and docs")
    report.add_argument("--tables", type=Path, default=records.LOCAL, help="folder with utility-*.json and others")
    report.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder of RESULTS.md")
    options = parser.parse_args()
    if options.command == "speed":
        from benchmarks.cost.speed import main as measure

        measure(options.out, options.only, options.others, not options.quick, options.seconds)
    if options.command == "zoo":
        from benchmarks.zoo.command import main as measure_zoo

        measure_zoo(options.out, options.only, options.seconds)
    if options.command == "noise":
        from benchmarks.cost.noise import main as time_noise

        time_noise(options.out)
    if options.command == "memory":
        from benchmarks.cost.memory import main as weigh

        weigh(options.out, options.only, options.others, options.resume)
    if options.command == "opacus":
        from benchmarks.cost.opacus_speed import main as compare_opacus

        compare_opacus(options.out, options.only, options.seconds)
    for name in ("seeds", "jobs", "together", "canaries", "runs", "steps", "engine_steps", "checked_steps"):
        if getattr(options, name, 1) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    if options.command == "utility" and options.rates and not options.optimizer:
        parser.error("--rates are those of an --optimizer")
    if options.command in ("utility", "imdb-speed", "tuning", "lstm"):
        from benchmarks.cost.imdb_speed import main as time_imdb
        from benchmarks.data import DamagedData, MissingData
        from benchmarks.utility.lstm import main as try_lstm
        from benchmarks.utility.tuning import main as tune

        try:
            if options.command == "utility" and options.optimizer:
                from benchmarks.utility.contenders import ContenderError
                from benchmarks.utility.own_optimizer import main as enter

                try:
                    enter(options)
                except ContenderError as error:
                    parser.exit(2, f"{error}\n")
            elif options.command == "utility":
                from benchmarks.utility.command import main as compare

                compare(options)
            elif options.command == "tuning":
                tune(options.out, options.seeds, options.data)
            elif options.command == "lstm":
                try_lstm(options.out, options.data)
            else:
                time_imdb(options.out, options.steps, options.engine_steps, options.checked_steps, options.data)
        except (MissingData, DamagedData) as error:
            parser.exit(2, f"{error}\n")
    if options.command == "users":
        from benchmarks.data import DamagedData, MissingData
        from benchmarks.utility.by_user import main as by_user_and_rating

        try:
            by_user_and_rating(options.out, options.seeds, options.data)
        except (MissingData, DamagedData) as error:
            parser.exit(2, f"{error}\n")
    if options.command == "audit":
        from benchmarks.audit.command import PARTS
        from benchmarks.audit.command import main as attack

        parts = options.part or PARTS
        attack(options.out, options.canaries, options.runs, options.pipeline_runs, options.only, parts)
    if options.command == "scaling":
        from benchmarks.cost import llm_scaling
        from benchmarks.cost.scaling import main as grow

        if options.llm:
            unknown = set(options.size or ()) - set(llm_scaling.SIZES)
            if unknown:
                parser.error(f"--size must be one of {', '.join(llm_scaling.SIZES)}; got {sorted(unknown)}")
            counts = [options.devices] if options.devices else list(llm_scaling.DEVICES)
            llm_scaling.main(options.out, options.size or list(llm_scaling.SIZES), counts)
        else:
            grow(options.out, options.devices)
    if options.command == "report":
        from benchmarks.report.command import main as write

        write(options.tables, options.to)
    if options.command == "quickstart":
        from benchmarks.quickstart import main as run

        run(options.out, options.seeds)


if __name__ == "__main__":
    main()
