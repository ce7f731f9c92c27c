"""Kinds: the command line. An error is a message on stderr and exit code 1, and no traceback."""

from typer.testing import CliRunner

from dcpc import errors
from dcpc.commands.cli import app
from dcpc.errors import BucketError, DcpcError, PlanError, ProfileError
from tests.cases.bad_input.kinds import INPUTS, Ground, Kind

FACTORY = "tests.cases.bad_input.kinds:Model"
_FILE = "inputs:\n" + "".join(f"  {n}: {s}\n" for n, s in INPUTS.items()) + "sizes: [{seq: 4}]\n"


def run(ground: Ground, *words: str) -> None:
    """Runs a command; `BUCKETS` is a file of buckets, in a folder with spaces, `FOLDER` a folder.

    Raises:
        DcpcError: that it reported.
    """
    (ground.folder / "meine größen").mkdir(exist_ok=True)
    file = ground.file(_FILE, "meine größen/b.yaml")
    known = {"BUCKETS": str(file), "FOLDER": str(ground.folder)}
    result = CliRunner().invoke(app, [known.get(word, word) for word in words])
    if result.exit_code == 0:
        return
    kind, _, text = result.stderr.strip().partition(": ")
    found = getattr(errors, kind, None)
    assert result.exit_code == 1, result.output
    assert isinstance(found, type), result.output
    assert issubclass(found, DcpcError)
    assert "Traceback" not in result.output
    raise found(text)


def _command(name: str, error: type[DcpcError], *words: str) -> Kind:
    return Kind(f"`{name}`", error, lambda g: run(g, *words))


_B = ("--buckets", "BUCKETS", "--backend", "eager")

COMMANDS = {
    "Commands": (
        _command("plan nothing", PlanError, "plan", "nothing", *_B),
        _command("plan no.such:model", PlanError, "plan", "no.such:model", *_B),
        _command("plan MODEL --buckets FOLDER", BucketError, "plan", FACTORY, "--buckets",
                 "FOLDER"),
        _command("plan MODEL --memory lots", PlanError, "plan", FACTORY, *_B, "--memory", "lots"),
        _command("plan MODEL --sp many", PlanError, "plan", FACTORY, *_B, "--sp", "many"),
        _command("plan MODEL --device abacus", ProfileError, "plan", FACTORY, *_B, "--device",
                 "abacus"),
        _command("plan MODEL --optimizer-bytes x", PlanError, "plan", FACTORY, *_B,
                 "--optimizer-bytes", "x"),
        _command("source MODEL --bucket seq", BucketError, "source", FACTORY, *_B, "--bucket",
                 "seq"),
        _command("report MODEL --html FOLDER", PlanError, "report", FACTORY, *_B, "--html",
                 "FOLDER"),
        _command("report MODEL --html on a full disk", PlanError, "report", FACTORY, *_B, "--html",
                 "/dev/full"),
        _command("simulate MODEL --trace on a full disk", PlanError, "simulate", FACTORY, *_B,
                 "--shares", "1", "--steps", "1", "--trace", "/dev/full"),
        _command("simulate MODEL --png on a full disk", PlanError, "simulate", FACTORY, *_B,
                 "--shares", "1", "--steps", "1", "--png", "/dev/full"),
        _command("replay FOLDER", PlanError, "replay", "FOLDER"),
        _command("simulate without samples", PlanError, "simulate", FACTORY, *_B),
        _command("simulate MODEL --shares a", PlanError, "simulate", FACTORY, *_B, "--shares",
                 "a"),
        _command("simulate MODEL --shares nan", PlanError, "simulate", FACTORY, *_B, "--shares",
                 "nan"),
    ),
}  # fmt: skip

# These are no numbers, or none of the command's: its own help says what there is, exit code 2.
USAGE = (
    ("plan", FACTORY, *_B, "--world", "0"),
    ("plan", FACTORY, *_B, "--world", "two"),
    ("plan", FACTORY, *_B, "--wrold", "2"),
    ("simulate", FACTORY, *_B, "--steps", "0"),
    ("check", FACTORY, *_B[:2], "--timeout", "0"),
    ("plans", FACTORY),
)
