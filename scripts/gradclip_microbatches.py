"""Record every microbatch of a gradient accumulation loop, for `gradclip accumulate`.

    from gradclip_microbatches import record_microbatches

    with record_microbatches(f"dumps/step_{step:06d}", model_parts, step=step, device_mesh=mesh,
                             training={"max_grad_norm": 1.0, "norm_type": 2.0}) as loop:
        for batch in microbatches:
            with loop.microbatch(labels=batch["labels"]):
                loss_of(model(batch)).backward()
    grad_norm = clip(...)
    loop.log(grad_norm)                                    # optional: what the step logged

leaves dumps/step_000100/microbatch_0000, microbatch_0001, ... and dumps/step_000100/gradients, what the step clips.
With a pipeline the loop's body is

        with loop.schedule_step(schedule, labels=labels):
            schedule.step(...)

and every chunk of the schedule is a microbatch. record_microbatch records a single one.

What is recorded is a microbatch's own gradient on this rank: hooks see it as the backward pass hands it over, before it
is added to earlier ones and before ranks are reduced, in the type in which it was computed. Covered: FSDP2
(fully_shard, replicate; over tensor or expert parallelism), DDP, DTensors and plain modules. A rank keeps one
microbatch's gradients in host memory until that microbatch ends (with schedule_step: those of all its chunks).

As in gradclip_record: nothing is raised into training, and what fails leaves no manifest. Ranks meet once, in a gather
when the loop ends without an exception; an exception of the loop's own body removes the hooks and passes through.
"""

import contextlib
import functools
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gradclip_record import (
    Held, Job, _describe_file, _local, _manifest, _manifest_text, _write_text, assemble, assemble_or_exit, finish,
    leave_fragment, write_rank)
from gradclip_slots import slots_of

__all__ = ["record_microbatches", "record_microbatch", "MicrobatchLoop"]

log = logging.getLogger("gradclip_record")


def record_microbatches(path, model_parts, *, step, **how):
    """A context manager around the accumulation loop of one step; see MicrobatchLoop for what is called inside.

    path: a directory for this step alone. how: device_mesh, moe_mesh, training, copies, tied, experts, stage,
    communicate, group, rank, world_size, overwrite and state, as of gradclip_record.record_gradients.
    """
    return MicrobatchLoop(path, model_parts, step=step, **how)


@contextlib.contextmanager
def record_microbatch(path, model_parts, *, step, index=0, count=1, labels=None, first_microbatch=None,
                      optimizer_step=None, synchronised=None, **how):
    """Around one backward pass: that microbatch alone, as the dump `path`. Arguments as of MicrobatchLoop."""
    loop = MicrobatchLoop(path, model_parts, step=step, only=(index, count), **how)
    with loop, loop.microbatch(labels=labels, first_microbatch=first_microbatch, optimizer_step=optimizer_step,
                               synchronised=synchronised):
        yield loop


@dataclass
class _Microbatch:
    index: int
    flags: dict                                   # of the manifest's "microbatch"; None: not known here
    labels: object = None
    captured: dict = field(default_factory=dict)  # slot -> its gradient, on the host
    reduced: set = field(default_factory=set)     # what the slots say: was this microbatch reduced?
    fragment: dict = None
    error: str = None


class MicrobatchLoop:
    """One rank's recording of one accumulation loop. `ok` after it: this rank did its part."""

    def __init__(self, path, model_parts, *, step, state="before_scale", training=None, communicate=None, group=None,
                 rank=None, world_size=None, only=None, **how):
        self.path, self.ok, self._only = Path(str(path)), False, only
        self._model_parts, self._how = model_parts, how
        self._keys = {"step": step, "state": state, "training": training}
        self._job = Job(rank, world_size, communicate, group)
        self._final = self.path / "gradients"
        self._microbatches, self._slots, self._undo, self._broken, self._prepared = [], [], [], None, False
        self._now = None               # the microbatch whose backward pass runs
        self._schedule_steps = None    # how many there were; None: no pipeline
        self._in_window = set()        # slots that have got a gradient since the last reduction
        self._entries = None           # of the manifest, as the last microbatch had them

    # The loop --------------------------------------------------------------------------------------------------------

    def __enter__(self):
        with self._logged("could not prepare recording"):
            self._slots = slots_of(self._model_parts)
            for slot in self._slots:
                slot.hook(functools.partial(self._capture, slot), self._undo)
            if any(slot.parameter.grad is not None for slot in self._slots):
                log.warning("gradclip: gradients were there before the first microbatch: no microbatch has them")
            self._prepared = True
        return self

    def __exit__(self, kind, error, trace):
        for undo in reversed(self._undo):
            with self._logged("could not remove a hook"):
                undo()
        self._undo = []
        if kind is None:
            self._finish()
        else:
            log.warning("gradclip: the loop ended in %s; %s stays unfinished", kind.__name__, self.path)
        return False

    @contextlib.contextmanager
    def microbatch(self, *, labels=None, first_microbatch=None, optimizer_step=None, synchronised=None):
        """Around one forward and backward pass.

        labels            [batch, sequence] label ids
        first_microbatch, optimizer_step   the flags while the backward pass runs; NeMo Automodel's own by default
        synchronised      whether a reduction follows it. By default FSDP2 and DDP are asked
        """
        self._now = self._begin(labels, first_microbatch=first_microbatch, optimizer_step=optimizer_step,
                                synchronised=synchronised)
        try:
            yield
        finally:
            microbatch, self._now = self._now, None
            with self._logged("could not record a microbatch", microbatch):
                microbatch.reduced.add(self._reduced(self._slots))
            self._write(microbatch)

    @contextlib.contextmanager
    def schedule_step(self, schedule, *, labels=None):
        """Around one step of a torch.distributed.pipelining schedule (or given a list of stages).

        labels: of the chunks, one tensor each, on the ranks that have them.
        """
        number, self._schedule_steps = self._schedule_steps or 0, (self._schedule_steps or 0) + 1
        chunks, undo, wrapped = {}, [], []
        with self._logged("could not hook the schedule"):
            stages = schedule if isinstance(schedule, (list, tuple)) else \
                getattr(schedule, "_stages", None) or [schedule._stage]
            first = len(self._microbatches)
            for chunk in range(schedule._n_microbatches if not isinstance(schedule, (list, tuple)) else 0):
                chunks[chunk] = self._begin(labels[chunk] if labels is not None else None, schedule_step=number)
            for stage in stages:
                undo.append(self._wrap_chunks(stage, chunks, first, number))
                wrapped.append(stage)
        try:
            yield
        finally:
            for one in undo:
                one()
            with self._logged("could not record a schedule step", *chunks.values()):
                self._close_schedule_step(wrapped, chunks)
            for chunk in sorted(chunks):
                self._write(chunks[chunk])

    def log(self, grad_norm):
        """Add the norm that the step logged. Rank 0 writes it; elsewhere, and after a failure, a no-op."""
        if self.ok and self._job.rank == 0:
            dumps = {self._dump_of(microbatch) for microbatch in self._microbatches[:1]}
            for dump in dumps | ({self._final} if self._only is None else set()):
                finish(dump, grad_norm=grad_norm)

    # One microbatch --------------------------------------------------------------------------------------------------

    def _begin(self, labels=None, **flags):
        index = self._only[0] if self._only else len(self._microbatches)
        microbatch = _Microbatch(index, flags, error=self._broken)
        with self._logged("could not take the labels", microbatch):
            microbatch.labels = None if labels is None else _local(labels).to("cpu", copy=True)
        self._microbatches.append(microbatch)
        return microbatch

    def _capture(self, slot, gradient):
        """The tensor hook. What it returns is None: autograd's gradient stays as it is."""
        microbatch = self._now
        if microbatch is None:
            if self._schedule_steps is None:  # a pipeline also runs a backward pass to learn its shapes
                self._fail("a backward pass outside of a microbatch")
            return
        with self._logged("could not take a gradient", microbatch):
            if slot in microbatch.captured:
                raise RuntimeError(f"{slot.name}: a second backward pass in one microbatch; with a pipeline use "
                                   "schedule_step, with reentrant checkpointing use_reentrant=False")
            if not microbatch.captured:
                _ask_automodel(microbatch.flags)
            microbatch.captured[slot] = slot.captured(gradient)
            self._in_window.add(slot)

    def _reduced(self, slots):
        """Whether the window of these slots ended; None if none of them knows."""
        inside = [slot for slot in slots if slot in self._in_window]
        answers = {slot.reduced() for slot in inside} - {None}
        if len(answers) > 1:
            waiting = next(slot.name for slot in inside if slot.reduced() is False)
            raise RuntimeError(f"{waiting} was not reduced, others were: their windows differ, no replay has that")
        if True in answers:
            self._in_window -= set(inside)
        return answers.pop() if answers else None

    def _write(self, microbatch):
        with self._logged("could not record a microbatch", microbatch):
            flags, found = microbatch.flags, microbatch.reduced - {None}
            if len(found) > 1:
                raise RuntimeError("pipeline stages of this rank were reduced after different chunks")
            if flags.get("synchronised") is None:
                flags["synchronised"] = found.pop() if found else None
        if microbatch.error is None:
            keys = {**self._keys, "microbatch": {**microbatch.flags, "index": microbatch.index}}
            microbatch.fragment = write_rank(
                self._dump_of(microbatch), self._job, lambda: self._held(microbatch), keys=keys,
                labels=microbatch.labels, **self._how)
            self._share_entries(microbatch.fragment)
        if microbatch.error is not None:
            microbatch.fragment = {"rank": self._job.rank, "error": microbatch.error}
        microbatch.captured.clear()

    def _held(self, microbatch):
        for slot in self._slots:
            parameter, gradient = slot.described(microbatch.captured.get(slot))
            yield Held(slot.model_part, slot.name, parameter, gradient, slot.types())

    def _share_entries(self, fragment):
        """Microbatches differ little: equal lists become one, in memory and in the gather."""
        if fragment.get("parameters") == self._entries is not None:
            fragment["parameters"] = self._entries
        self._entries = fragment.get("parameters", self._entries)

    # Pipelines -------------------------------------------------------------------------------------------------------

    def _wrap_chunks(self, stage, chunks, first, number):
        """Say which chunk's backward pass runs. Returns how to undo it."""
        original, weights = stage.backward_one_chunk, getattr(stage, "backward_weight_one_chunk", None)
        slots = [slot for slot in self._slots if slot.inside(stage.submod)]

        @functools.wraps(original)
        def backward_one_chunk(chunk, *arguments, **named):
            if chunk not in chunks:
                chunks[chunk] = self._begin(schedule_step=number)
                chunks[chunk].index = first + chunk
            self._now = chunks[chunk]
            if not named.get("full_backward", True) and not stage.is_first:
                self._fail("the schedule splits backward passes, which keeps weights' gradients from hooks")
            try:
                return original(chunk, *arguments, **named)
            finally:
                microbatch, self._now = self._now, None
                with self._logged("could not record a chunk", microbatch):
                    microbatch.reduced.add(self._reduced(slots))

        @functools.wraps(weights or original)
        def backward_weight_one_chunk(chunk, *arguments, **named):
            self._now = chunks.get(chunk)
            try:
                return weights(chunk, *arguments, **named)
            finally:
                self._now = None

        stage.backward_one_chunk = backward_one_chunk
        if weights is not None:
            stage.backward_weight_one_chunk = backward_weight_one_chunk

        def undo():
            for name in ("backward_one_chunk", "backward_weight_one_chunk"):
                vars(stage).pop(name, None)
        return undo

    def _close_schedule_step(self, stages, chunks):
        """The schedule reduces after its last chunk."""
        last = chunks[max(chunks)] if chunks else None
        for stage in stages if last is not None else []:
            answer = self._reduced([slot for slot in self._slots if slot.inside(stage.submod)])
            if answer is not None:
                last.reduced = {answer}

    # The end ---------------------------------------------------------------------------------------------------------

    def _finish(self):
        """Write the final gradients and, on rank 0, all manifests. The one gather of the loop."""
        final = {"rank": self._job.rank, "error": self._broken} if not self._prepared else None
        if self._only is None and self._prepared:
            labels = [one.labels for one in self._microbatches]
            final = write_rank(
                self._final, self._job,
                lambda: (Held(one.model_part, one.name, one.parameter, one.parameter.grad) for one in self._slots),
                keys={**self._keys, "microbatch": None}, **self._how,
                labels=labels if all(one is not None for one in labels) else None)
        fragments = [one.fragment for one in self._microbatches]
        if self._broken is not None:
            fragments = [{"rank": self._job.rank, "error": self._broken} for _ in fragments]
        for one in fragments:
            if "job" in one:
                one["job"]["microbatch"]["count"] = self._only[1] if self._only else len(fragments)
                one["job"]["accumulation"] = {"sync": self._sync()}
        try:
            everyone = self._job.gather({"final": final, "microbatches": fragments})
            if everyone is not None:
                with self._logged("could not write a manifest"):
                    self._write_manifests(everyone)
            elif not self._job.communicate:
                for dump, one in [*zip(map(self._dump_of, self._microbatches), fragments), (self._final, final)]:
                    if one is not None and "error" not in one:
                        leave_fragment(dump, one)
            self.ok = self._broken is None and not any(one and "error" in one for one in (*fragments, final))
        except Exception:  # noqa: BLE001
            log.exception("gradclip: manifests are missing below %s", self.path)

    def _write_manifests(self, everyone):
        if self._only is None:
            text = _manifest_text(_manifest([one["final"] for one in everyone]))
            _write_text(self._final / "manifest.json", text)
        counts = [len(one["microbatches"]) for one in everyone]
        if len(set(counts)) > 1:
            raise RuntimeError(f"the ranks recorded {counts} microbatches")
        manifests = join_microbatches([[one["microbatches"][k] for one in everyone] for k in range(counts[0])])
        for microbatch, manifest in zip(self._microbatches, manifests):
            _write_text(self._dump_of(microbatch) / "manifest.json", _manifest_text(manifest))

    def _sync(self):
        flags = [one.flags.get("synchronised") for one in self._microbatches]
        if self._schedule_steps is not None:
            return "schedule"
        return "every" if len(flags) > 1 and all(flags) else "deferred"

    def _dump_of(self, microbatch):
        return self.path if self._only else self.path / f"microbatch_{microbatch.index:04d}"

    def _fail(self, why):
        if self._broken is None:
            log.error("gradclip: rank %d cannot record below %s: %s", self._job.rank, self.path, why)
            self._broken = why

    @contextlib.contextmanager
    def _logged(self, what, *microbatches):
        """Keep what fails out of training: of these microbatches, or else of the whole loop."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - training must go on
            log.exception("gradclip: rank %d %s below %s", self._job.rank, what, self.path)
            for microbatch in microbatches:
                microbatch.error = f"{type(error).__name__}: {error}"
            if not microbatches:
                self._broken = self._broken or f"{type(error).__name__}: {error}"


def _ask_automodel(flags):
    """NeMo Automodel keeps the two flags of its preparations in a module."""
    module = sys.modules.get("nemo_automodel.components.models.common.utils")
    for flag, getter in (("first_microbatch", "get_is_first_microbatch"), ("optimizer_step", "get_is_optim_step")):
        if module is not None and flags.get(flag) is None and hasattr(module, getter):
            flags[flag] = getattr(module, getter)()


# The manifests of a loop ---------------------------------------------------------------------------------------------

def join_microbatches(of_microbatches):
    """Manifests of a loop's microbatches from lists of all ranks' fragments. Raises if they are not of one loop."""
    manifests = []
    for fragments in of_microbatches:
        flags = _agreed_flags(fragments)
        fragments = [{**one, "parameters": [dict(entry) for entry in one["parameters"]],
                      "job": {**one["job"], "microbatch": flags}} if "job" in one else one for one in fragments]
        manifests.append(_manifest(fragments, keep_none=True))
    # Of a gradient that is None on every rank, type and placements are those of the other microbatches.
    for entries in zip(*(manifest["parameters"] for manifest in manifests)):
        present = next((entry for entry in entries if not entry["none"]), {})
        for entry in entries:
            if entry.pop("none") and present:
                entry.pop("gradient_placements", None)
                entry.update({key: present[key] for key in ("dtype", "gradient_placements") if key in present})
    return manifests


def _agreed_flags(fragments):
    """A rank that cannot know a flag (a stage without reductions) takes the others' word."""
    agreed = {}
    for fragment in fragments:
        for key, value in fragment.get("job", {}).get("microbatch", {}).items():
            if value is not None and agreed.setdefault(key, value) != value:
                raise ValueError(f"{key} is {value} on rank {fragment['rank']}, {agreed[key]} on others")
    return agreed


def assemble_microbatches(path):
    """Make the manifests of a loop that was recorded with communicate=False, and remove its fragments."""
    dumps = sorted(Path(path).glob("microbatch_*"))
    files = [sorted(dump.glob("rank_*.json")) for dump in dumps]
    manifests = join_microbatches([[json.loads(file.read_text(encoding="utf-8")) for file in of] for of in files])
    for dump, of, manifest in zip(dumps, files, manifests):
        for name, recorded in manifest["files"].items():
            if _describe_file(dump / name) != recorded:
                raise ValueError(f"{dump / name} is not the file that its fragment describes")
        _write_text(dump / "manifest.json", _manifest_text(manifest))
        for file in of:
            file.unlink()
    if (Path(path) / "gradients").exists():
        assemble(Path(path) / "gradients")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "assemble":
        sys.exit("usage: python gradclip_microbatches.py assemble DIR")
    assemble_or_exit(assemble_microbatches, sys.argv[2])
