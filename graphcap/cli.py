"""The command line: one verb, one file. Loads no torch until a verb needs it.

Exit codes: 0 finished, 2 something the user must mend, 3 stopped and can go on, 1 failed.
"""

import argparse
import contextlib
import os
import sys

from graphcap import __version__
from graphcap.errors import GraphcapError, in_the_one_form

NOTE = "loads the target, plans the rows, trains, then decodes; the time left is shown once training runs"
# What the same command does another time.
AGAIN = {"train": "continues from the newest checkpoint", "extract": "continues with what is missing"}
TRAIN_EXAMPLE = """example:
  graphcap train runs/tiny.toml
  graphcap train runs/tiny.toml optimizer.epochs=2 run.name=short

Started again, the same command continues from the newest complete checkpoint.
`graphcap train RECIPE --help` prints every key of a recipe."""

EVAL_EXAMPLE = """example:
  graphcap eval runs/out/tiny
  graphcap eval runs/out/tiny runs/out/short --max-new-tokens 256
  graphcap eval runs/out/tiny --temperature 1 --rule sampled --show 3
  graphcap eval DRAFTER-FOLDER --target TARGET-FOLDER --prompts chats.jsonl"""


EXPORT_EXAMPLE = """example:
  graphcap export runs/out/tiny drafter
  graphcap export runs/out/tiny drafter-bf16 --dtype bfloat16
  graphcap export --check drafter --target graphcap/assets/tiny"""


EXTRACT_EXAMPLE = """example:
  graphcap extract runs/tiny.toml --out runs/out/features
  graphcap train runs/tiny.toml features.path=runs/out/features
  graphcap extract --check runs/out/features

Takes the recipe that training will take. Started again, the same command computes only what the folder lacks, and what was
found damaged."""


SHAPES_EXAMPLE = """example:
  graphcap shapes chats.jsonl --target TARGET-FOLDER --out shapes/chats.json
  graphcap shapes runs/tiny.toml --show 2
  graphcap shapes chats.jsonl --target TARGET-FOLDER --measure --rows single --buckets 4

Train the recipe that a file was planned from with shapes.plan = "shapes/chats.json", or another one that has the same
documents, drafter.block_size and keys of [shapes]."""


STATUS_EXAMPLE = """example:
  graphcap status runs/out/tiny
  graphcap status runs/out --json"""


DOCTOR_EXAMPLE = """example:
  graphcap doctor
  graphcap doctor --json"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="graphcap",
        description="Train drafters for speculative decoding, and measure them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  graphcap train runs/tiny.toml\n\n`graphcap VERB --help` says more about a verb.",
    )
    top.add_argument("--version", action="version", version=f"graphcap {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_train(verbs)
    _add_eval(verbs)
    _add_export(verbs)
    _add_extract(verbs)
    _add_shapes(verbs)
    _add_status(verbs)
    _add_doctor(verbs)
    return top


def _verb(verbs, name: str, text: str, example: str, **options) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name, help=text, description=text, epilog=example, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def _add_train(verbs) -> None:
    train = _verb(verbs, "train", "train a drafter from a recipe, then decode with it", TRAIN_EXAMPLE, add_help=False)
    train.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file, for example runs/tiny.toml")
    train.add_argument("overrides", metavar="section.key=value", nargs="*", help="override a key of the recipe")
    train.add_argument("--eager", action="store_true", help="launch the step from Python instead of replaying CUDA graphs")
    train.add_argument(
        "--here", action="store_true", help="train in this process, with no supervisor: for debuggers, profilers and notebooks"
    )
    train.add_argument("--dry-run", action="store_true", help="say what the run would be and need; train and write nothing")
    train.add_argument(
        "--show", type=_positive, metavar="N", help="with --dry-run: N documents, with what is supervised marked"
    )
    train.add_argument("-h", "--help", action="store_true", help="show this, and with a RECIPE every key of a recipe")
    train.set_defaults(run=_train, parser=train)


def _add_eval(verbs) -> None:
    evaluate = _verb(verbs, "eval", "decode prompts with a drafter, and compare with plain decoding", EVAL_EXAMPLE)
    evaluate.add_argument(
        "folders", metavar="RUN-or-FOLDER", nargs="+", help="a run's folder, or a drafter's folder in z-lab's format"
    )
    _add_target(evaluate, "the target, a folder or a Hub name; a run knows its own")
    evaluate.add_argument(
        "--prompts", action="append", default=[], metavar="FILE", help="JSONL of conversations; a run: its held-out ones"
    )
    evaluate.add_argument(
        "--num-prompts", type=_positive, metavar="N", help="how many prompts; eval.prompts of the run or its default"
    )
    evaluate.add_argument(
        "--max-new-tokens", type=_positive, metavar="N", help="longest reply; eval.max_new_tokens of the run or its default"
    )
    evaluate.add_argument(
        "--passes", type=_positive, metavar="N", help="timed passes, the median counts; eval.passes of the run or its default"
    )
    evaluate.add_argument(
        "--temperature", type=_not_negative, metavar="T", help="0: greedy; eval.temperature of the run or its default"
    )
    evaluate.add_argument(
        "--rule",
        choices=("match", "sampled"),
        help="above temperature 0: greedy drafts kept while the target samples them, or sampled ones kept with min(1, p/q)",
    )
    evaluate.add_argument("--seed", type=_whole, metavar="N", help="of the samples; run.seed of the run or its default")
    evaluate.add_argument(
        "--show", type=_positive, metavar="N", default=0, help="print N replies: committed runs shaded, refused drafts struck"
    )
    evaluate.add_argument("--eager", action="store_true", help="launch the steps from Python instead of replaying CUDA graphs")
    evaluate.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    evaluate.set_defaults(run=_eval, parser=evaluate)


def _add_export(verbs) -> None:
    export = _verb(verbs, "export", "write a run's best drafter as a folder to serve, or check such a folder", EXPORT_EXAMPLE)
    export.add_argument("source", metavar="RUN", nargs="?", help="a run's folder, or one of its checkpoints")
    export.add_argument("out", metavar="OUT", nargs="?", help="the folder to make")
    export.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: as the run saved it")
    export.add_argument("--check", metavar="FOLDER", help="say whether a drafter's folder in z-lab's format is whole and sound")
    _add_target(export, "with --check: a target that it has to fit, folder or Hub name")
    export.set_defaults(run=_export, parser=export)


def _add_target(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("--target", help=text)
    verb.add_argument("--revision", help="of --target, where it is a Hub name; target.revision's default")
    verb.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with --target")


def _target_of(options):
    """The target of the options, as a recipe has it, or None."""
    from graphcap.config import Target

    given = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    given = {name: value for name, value in given.items() if value}
    if options.target is None and given:
        options.parser.error("--revision and --trust-remote-code belong to --target")
    return None if options.target is None else Target(path=options.target, **given)


def _add_extract(verbs) -> None:
    extract = _verb(verbs, "extract", "write a target's features of a recipe's documents, to train without it", EXTRACT_EXAMPLE)
    extract.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file, for example runs/tiny.toml")
    extract.add_argument("overrides", metavar="section.key=value", nargs="*", help="override a key of the recipe")
    extract.add_argument("--out", metavar="FOLDER", help="the folder to make or to complete; features.path of the recipe")
    extract.add_argument("--eager", action="store_true", help="launch the target from Python instead of replaying CUDA graphs")
    extract.add_argument(
        "--check", metavar="FOLDER", help="read every byte of such a folder, say whether it is whole, and mark what is not"
    )
    extract.set_defaults(run=_extract, parser=extract)


def _add_shapes(verbs) -> None:
    plan = _verb(
        verbs, "shapes", "plan the buckets for some documents, and say what they are predicted to cost", SHAPES_EXAMPLE
    )
    plan.add_argument(
        "overrides",
        metavar="RECIPE-or-DATA",
        nargs="+",
        help="a recipe, or files of conversations; section.key=value overrides",
    )
    plan.add_argument("--target", help="the target's folder or Hub name, where no recipe names it")
    plan.add_argument("--buckets", type=_positive, metavar="K", help="at most so many; shapes.max_buckets")
    plan.add_argument("--rows", choices=("packed", "single"), help="several documents a row, or one; shapes.rows")
    plan.add_argument("--max-length", type=_positive, metavar="L", help="longest document in tokens; data.max_length")
    plan.add_argument("--measure", action="store_true", help="time a few micro steps here, and plan with what they take")
    plan.add_argument("--out", metavar="FILE", default="", help="write the shapes file, for example shapes/chats.json")
    plan.add_argument(
        "--picture", metavar="FILE", default="", help="draw the lengths with the buckets (pip install matplotlib)"
    )
    plan.add_argument("--show", type=_positive, metavar="N", default=0, help="N documents, with what is supervised marked")
    plan.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    plan.set_defaults(run=_shapes, parser=plan)


def _add_status(verbs) -> None:
    status = _verb(verbs, "status", "say what a run is doing, or how it ended", STATUS_EXAMPLE)
    status.add_argument("folders", metavar="RUN", nargs="+", help="a run's folder, or a folder that holds runs")
    status.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    status.set_defaults(run=_status, parser=status)


def _add_doctor(verbs) -> None:
    doctor = _verb(verbs, "doctor", "say whether this machine can train, and what to type where it cannot", DOCTOR_EXAMPLE)
    doctor.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    doctor.set_defaults(run=_doctor, parser=doctor)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got '{text}'")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, below 2^63, got '{text}'")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got '{text}'")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a run
    # Threads that wait for each other give their core away sooner: else a machine with other load runs several times slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if options.verb in ("train", "extract", "shapes") and not any(word.startswith("-") for word in rest):
        options.overrides += rest  # overrides may stand behind an option too
    elif rest:
        unknown = [word for word in rest if word.startswith("-")] if hasattr(options, "overrides") else rest
        options.parser.error(f"unrecognized: {' '.join(unknown or rest)}")
    try:
        return options.run(options)
    except GraphcapError as error:
        print(f"graphcap: {error.told}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _stopped(options)
    except BrokenPipeError:
        _give_up_output()
        return 1
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps one that comes while a class is made
            return _stopped(options)
        told = in_the_one_form(error, again=AGAIN.get(options.verb, ""))
        if told is error:
            raise
        print(f"graphcap: {told}", file=sys.stderr)
        return 1


def _stopped(options) -> int:
    again = "" if options.verb == "train" and options.dry_run else AGAIN.get(options.verb, "")
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        print(f"graphcap: stopped on request{again and f'; the same command {again}'}", file=sys.stderr)
    return 3


def _give_up_output() -> None:
    """Whoever read standard output is gone: what is printed from here on goes nowhere, and ends nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _train(options) -> int:
    from graphcap import config

    if options.help:
        options.parser.print_help()
        if options.recipe:
            print(f"\nEvery key of a recipe:{config.describe()}")
        return 0
    if options.recipe is None:
        options.parser.error("RECIPE is missing; for example: graphcap train runs/tiny.toml")
    recipe = config.load_recipe(options.recipe, options.overrides)
    from graphcap.ops import launch, rank, report, runfolder
    from graphcap.ops.progress import quiet_libraries, silence_transformers

    is_rank = "RANK" in os.environ  # started by our own supervisor, which has said and checked all this, or by torchrun
    if rank.SUPERVISOR not in os.environ:
        if os.environ.get("RANK", "0") == "0":
            _say(f"graphcap {__version__} · {options.recipe} · {recipe.run.note or NOTE}")
        finished = runfolder.finished_result(recipe)
        if finished is not None:
            _say(
                f"{recipe.folder} has finished, so nothing is trained. Its table:\n\n{report.table(finished, recipe.folder)}\n"
            )
            _say(f"to start afresh: graphcap train {options.recipe} run.name=OTHER, or remove {recipe.folder}")
            return 0
    if options.show and not options.dry_run:
        options.parser.error("--show belongs to --dry-run")
    if options.dry_run:
        quiet_libraries(None)
        from graphcap.preview import preview

        silence_transformers()
        preview(recipe, show=options.show or 0, say=_say)
        return 0
    arguments = ["train", options.recipe, *options.overrides, *(["--eager"] if options.eager else [])]
    if not options.here and not is_rank:
        return launch.Supervisor(recipe, arguments, _say).run()
    quiet_libraries(None)
    with (
        rank.leaving_at_once() if rank.SUPERVISOR in os.environ else contextlib.nullcontext(),
        rank.entered(recipe, here=options.here, command=rank.command_of(arguments)) as place,
    ):
        from graphcap.train import train

        silence_transformers()
        return train(recipe, rank=place, eager=options.eager, say=_say)


_unsaid: list[str] = []  # lines that the disk of a rank's standard output had no room for


def _say(line: str) -> None:
    _unsaid.append(line)
    try:
        while _unsaid:
            print(_unsaid[0], flush=True)
            del _unsaid[0]
    except BrokenPipeError:
        _give_up_output()
    except OSError:
        pass  # they come with a later line


def _export(options) -> int:
    wrong = not (options.source and options.out) if options.check is None else options.source
    if wrong:
        options.parser.error("give RUN and OUT, or --check FOLDER; for example: graphcap export runs/out/tiny drafter")
    target = _target_of(options)
    from graphcap.ops.progress import quiet_libraries, silence_transformers

    quiet_libraries(None)
    from graphcap import export

    silence_transformers()
    if options.check is None:
        export.export(options.source, options.out, dtype=options.dtype, say=_say)
    else:
        for line in export.check(options.check, target=target):
            _say(line)
        _say("whole and sound")
    return 0


def _extract(options) -> int:
    if options.check is not None and options.recipe is not None:
        options.parser.error("RECIPE writes a folder, --check FOLDER reads one: not both at once")
    if options.check is None and options.recipe is None:
        options.parser.error("give RECIPE, or --check FOLDER; for example: graphcap extract runs/tiny.toml --out FOLDER")
    if options.check is not None and (options.out is not None or options.eager):
        options.parser.error("--check reads the folder it names; --out and --eager belong to RECIPE")
    from graphcap import config

    recipe = config.load_recipe(options.recipe, options.overrides) if options.check is None else None
    out = options.check or options.out or recipe.features.path
    if not out:
        options.parser.error("--out FOLDER is missing; for example: graphcap extract runs/tiny.toml --out runs/out/features")
    from graphcap.ops import stopping
    from graphcap.ops.progress import quiet_libraries, silence_transformers

    quiet_libraries(None)
    from graphcap import extract

    silence_transformers()
    if options.check is not None:
        for line in extract.check(out):
            _say(line)
        _say("whole and sound")
    else:
        with stopping.asked_by_signals() as stop:
            caller = extract.Caller(_say, None, stop.asked, elsewhere="--out FOLDER")
            if not extract.extract(recipe, out, continued=None, eager=options.eager, caller=caller):
                return _stopped(options)
    return 0


def _shapes(options) -> int:
    from graphcap import config

    if options.json and options.show:
        options.parser.error("--show does not go with --json")
    recipe = config.load_planned(
        options.overrides,
        target=options.target,
        keys={"shapes.max_buckets": options.buckets, "shapes.rows": options.rows, "data.max_length": options.max_length},
    )
    from graphcap.ops.progress import quiet_libraries, silence_transformers

    quiet_libraries(None)
    from graphcap.shapes import Wanted, shapes

    silence_transformers()
    wanted = Wanted(out=options.out, picture=options.picture, measure=options.measure, show=options.show, as_json=options.json)
    shapes(recipe, wanted, _say)
    return 0


def _status(options) -> int:
    from graphcap.ops import status

    return status.run(options.folders, as_json=options.json, say=_say)


def _doctor(options) -> int:
    from graphcap.ops import doctor

    return doctor.run(as_json=options.json, say=_say)


def _eval(options) -> int:
    target = _target_of(options)
    from graphcap.ops.progress import quiet_libraries, silence_transformers

    quiet_libraries(None)
    from graphcap.eval import print_results, run_eval

    silence_transformers()
    settings = {"prompts": options.num_prompts, "max_new_tokens": options.max_new_tokens, "passes": options.passes}
    settings |= {"temperature": options.temperature, "rule": options.rule, "seed": options.seed}
    settings |= {"show": options.show, "eager": options.eager}
    results = run_eval(options.folders, target=target, prompt_paths=options.prompts, settings=settings)
    print_results(results, as_json=options.json, terminal=sys.stdout.isatty())
    return 0
