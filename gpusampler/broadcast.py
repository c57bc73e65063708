"""Chunks of plans on the wire: one integer tensor each, broadcast within a group of its own, without waiting.

A message is a header of `HEADER` integers and a payload: a chunk's samples and group ends (4 bytes each up to 2^31
samples, so at most 8 bytes a sample), or the text of an error. All messages of an iteration have one size, as the
receiver cannot know which kind comes next.

`Channel` drives CPU and accelerators with the same lines: buffers are pinned and copied on a side stream where the
device has streams, and are the very tensors that are sent where it has none. Only the thread that iterates may use a
channel: communicators of one device must not be driven from several threads. Nothing here blocks, except `receive`,
and `post` when the broadcast that used the same buffer `slots` messages ago has not ended.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from gpusampler.errors import DistributedError
from gpusampler.pipeline import Chunk, Integers

HEADER = 10
TEXT_BYTES = 4096
_FORMAT = 0x67504C31
_LOW = (1 << 31) - 1


class Status(IntEnum):
    """What a message holds."""

    CHUNK = 1
    NOT_READY = 2  # the root is alive and still planning: post another receive
    FAILED = 3  # planning raised on the root; the payload is the text
    STALE = 4  # matches what another rank posted in an iteration that this one had left


class Message(NamedTuple):
    """One message; `chunk` or `text` by status."""

    status: Status
    generation: int
    epoch: int = 0
    chunk: Chunk | None = None
    text: str = ""


def message_size(rows: int, size: int, groups: int, dtype: torch.dtype) -> int:
    """Integers that hold a chunk of up to `rows` steps of up to `size` samples, or an error's text."""
    return HEADER + max(rows * (size + groups), TEXT_BYTES // dtype.itemsize)


def pack(message: Message, out: Integers) -> None:
    """Write a message; what the payload does not need is left as it was."""
    payload = out[HEADER:]
    step = rows = size = groups = used = 0
    if message.chunk is not None:
        step, (rows, size), groups = message.chunk.step, message.chunk.samples.shape, message.chunk.ends.shape[1]
        cut, used = rows * size, rows * (size + groups)
        payload[:cut] = message.chunk.samples.reshape(-1)
        payload[cut:used] = message.chunk.ends.reshape(-1)
    elif message.text:
        text = message.text.encode()[:TEXT_BYTES]
        used = -(-len(text) // payload.itemsize)
        payload[:used] = np.frombuffer(text.ljust(used * payload.itemsize), dtype=payload.dtype)
    digest = zlib.adler32(payload[:used].data) & _LOW
    place = (message.generation & _LOW, message.epoch & _LOW, step & _LOW)
    out[:HEADER] = (_FORMAT, message.status, *place, rows, size, groups, used, digest)


def unpack(data: Integers) -> Message:
    """Read a message, copying its payload.

    Raises:
        DistributedError: these integers are not a message, or not whole.
    """
    form, status, generation, epoch, step, rows, size, groups, used, digest = data[:HEADER].tolist()
    payload = data[HEADER : HEADER + used].copy()
    if form != _FORMAT or digest != zlib.adler32(payload.data) & _LOW:
        raise DistributedError(
            f"a plan arrived damaged: header {data[:HEADER].tolist()}; was the group used elsewhere?"
        )
    if status == Status.CHUNK:
        samples, ends = payload[: rows * size].reshape(rows, size), payload[rows * size :].reshape(rows, groups)
        return Message(Status.CHUNK, generation, epoch, Chunk(step, samples, ends))
    text = payload.tobytes().decode(errors="replace").rstrip() if status == Status.FAILED else ""
    return Message(Status(status), generation, epoch, None, text)


class _Slot:
    """A buffer on the host, its twin on the device, and the broadcast that uses them."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, event: Any) -> None:
        self.host = torch.zeros(numel, dtype=dtype, pin_memory=device.type != "cpu")
        self.device = self.host if device.type == "cpu" else self.host.to(device)
        self.work: dist.Work | None = None
        self.event = event


class Channel:
    """Broadcasts from one member of a group to the others, in order, several at a time.

    Args:
        group: used for nothing else.
        root: global rank of the member that sends.
        device: where the group's backend takes tensors.
        numel: integers in a message.
        dtype: int32 or int64.
        slots: messages in flight at most, plus one.
        timeout: seconds after which a message that does not arrive is an error.

    Attributes:
        posted: messages posted so far, on any channel of the group.
        generation: the iteration that may use the channel.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        root: int,
        device: torch.device,
        numel: int,
        dtype: torch.dtype,
        slots: int,
        timeout: float,
    ) -> None:
        """Allocate the buffers."""
        self.root = root
        self._group, self._timeout = group, timeout
        self._sends = dist.get_rank() == root
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        # an accelerator's wait() is an order to its stream, gloo's blocks: it is left for when the message is needed
        self._by_stream = device.type != "cpu"
        self._slots = [_Slot(numel, dtype, device, self._module.Event()) for _ in range(slots)]
        self._stream.wait_stream(self._module.current_stream())  # which the buffers were made on
        self.posted = self.generation = 0
        self.message_bytes = numel * dtype.itemsize

    def post(self, write: Callable[[Integers], None] | None) -> int:
        """Start the next broadcast; `write` fills it on the root. Returns its number, for `receive`."""
        number = self.posted
        slot = self._slots[number % len(self._slots)]
        self._complete(slot)
        with self._module.stream(self._stream):
            if write is not None:
                write(slot.host.numpy())
                slot.device.copy_(slot.host, non_blocking=True)
            try:
                slot.work = dist.broadcast(slot.device, src=self.root, group=self._group, async_op=True)
            except (RuntimeError, ValueError) as error:  # ValueError: the group has been destroyed
                raise DistributedError(f"plans cannot be broadcast any more: {error}") from error
            if self._by_stream:
                self._stage(slot)
        self.posted += 1
        return number

    def arrived(self, number: int) -> bool:
        """Whether `receive` would not wait."""
        slot = self._slots[number % len(self._slots)]
        return slot.work is None or bool(slot.event.query() if self._by_stream else slot.work.is_completed())

    def receive(self, number: int) -> Message:
        """Wait for a message and read it.

        Raises:
            DistributedError: it did not arrive in time, or the sender is gone.
        """
        slot = self._slots[number % len(self._slots)]
        self._complete(slot)
        return unpack(slot.host.numpy())

    def drain(self, posted: int) -> None:
        """Post up to a number that other ranks have reached, and drop everything that is in flight."""
        while self.posted < posted:
            self.post(partial(pack, Message(Status.STALE, self.generation)) if self._sends else None)
        self.flush()

    def flush(self) -> None:
        """Wait until every broadcast posted has ended on this rank."""
        for slot in self._slots:
            self._complete(slot)

    def _stage(self, slot: _Slot) -> None:
        if slot.work is not None:
            slot.work.wait()
        if not self._sends:
            slot.host.copy_(slot.device, non_blocking=True)
        slot.event.record(self._stream)

    def _complete(self, slot: _Slot) -> None:
        if slot.work is None:
            return
        try:
            if not self._by_stream:
                self._stage(slot)
            deadline = time.monotonic() + self._timeout
            while not slot.event.query():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer for {self._timeout:g} s")
                time.sleep(5e-5)
        except RuntimeError as error:
            if "DataLoader worker" in str(error):  # torch says so of a dead one wherever the main thread is
                raise
            what = "was not taken by all ranks" if self._sends else f"did not arrive from rank {self.root}"
            raise DistributedError(
                f"a plan {what} within {self._timeout:g} s: a rank is dead or stuck, or ranks are at different "
                "micro-batches. Ranks must leave an epoch at the same micro-batch; where loaders that are not torch "
                "DataLoaders take micro-batches ahead, and not equally many on all ranks, tell each rank how many: "
                f"process_group=PlanGroup(loader_ahead=...). Cause: {error}"
            ) from error
        slot.work = None
