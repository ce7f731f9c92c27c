"""Aims of the house, and why some are missed: the columns that `python -m tests.house` prints."""

# Figure -> its aim, and the reason while it is missed.
AIMS: dict[str, tuple[int, str]] = {
    "lines in dcpc/": (
        66_000,
        "Capabilities joined since the aim was set (`JOINED` in tests/test_house.py, and those of "
        "the issues before it). A reading found about 20 lines to take out in 700: 66,000 means "
        "that capabilities go.",
    ),
    "lines in benchmarks/": (
        9_000,
        "Each measures figures that an issue asks for, or is the only measurement of a page.",
    ),
    "methods of CompiledModel": (12, ""),
    "methods of PipelinedModel": (12, ""),
    "functions > 50 lines": (10, ""),
    "functions of >= 9 parameters": (
        2,
        "Commands, whose parameters are their options; `ModelCore` and `Traced`, made in one place "
        "of what they hold.",
    ),
    "classes > 12 methods": (
        8,
        "Private methods count: most have at most twelve that others call, and one subject.",
    ),
    "class names that differ by an underscore": (0, ""),
    "class names that differ by a plural": (0, "`Bucket` and `Buckets` are public."),
    "file names that repeat": (15, ""),
    'docstrings whose first sentence needs "what"': (242, ""),
    'argument texts that begin with "of"': (104, ""),
}
ROOMS = "Each is a part of one phase that reads the module itself: its state, modes, hooks, loss."
# Figures of clocks: figure, value, aim, and the reason while it is missed.
MEASURED = (
    (
        "`make test` on two cores", "6:49 minutes (29 November 2026, an idle Intel Xeon)",
        "<= 8 minutes", "",
    ),
    (
        "CI whole", "2,730 s (28 November 2026)", "<= 2,400 s",
        "Exactness of the capabilities that joined.",
    ),
)  # fmt: skip
