"""1F1B: the order in which a stage computes, receives and sends, for any number of micro-batches.

A stage first computes as many forwards as there are stages after it. Then each forward is followed by the
backward of the oldest micro-batch, so no stage holds the activations of more than `stages` micro-batches.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Number of sends that need not be complete before the next send; see `_Channel.send`.
_UNDER_WAY = 2


@dataclass
class _Channel:
    """A channel to or from one other stage, in one direction, with its own process group."""

    rank: int
    group: Any
    device: torch.device
    _sent: deque[tuple[Any, Tensor]] = field(default_factory=deque[tuple[Any, Tensor]])

    def send(self, tensor: Tensor) -> None:
        """Start to send, and keep the tensor until it is sent. Wait for all sends but the last two. The wait
        cannot deadlock: the receiver has already received them, or waits for nothing else."""
        self._sent.append((dist.isend(tensor, dst=self.rank, group=self.group), tensor))
        self.flush(_UNDER_WAY)

    def receive(self, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(*shape, device=self.device)
        dist.recv(tensor, src=self.rank, group=self.group)
        return tensor

    def flush(self, keep: int = 0) -> None:
        while len(self._sent) > keep:
            self._sent.popleft()[0].wait()


class Neighbours:
    """The stages before and after this one, if there are any. `device`: that of the received tensors."""

    def __init__(
        self, line: Sequence[int], index: int, device: torch.device, forwards: Any, backwards: Any
    ) -> None:
        self.after = len(line) - index - 1  # stages after this one
        has_previous, has_next = index > 0, self.after > 0
        self.hidden_in = _Channel(line[index - 1], forwards, device) if has_previous else None
        self.gradient_out = _Channel(line[index - 1], backwards, device) if has_previous else None
        self.hidden_out = _Channel(line[index + 1], forwards, device) if has_next else None
        self.gradient_in = _Channel(line[index + 1], backwards, device) if has_next else None

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for channel in (self.hidden_out, self.gradient_out):
            if channel is not None:
                channel.flush()


# (index of a micro-batch, hidden states of the stage before; None in the first stage) -> output of the stage.
Compute = Callable[[int, "Tensor | None"], Tensor]
Shapes = Sequence[Sequence[int]]


def run_forward(
    neighbours: Neighbours, shapes: Shapes, compute: Compute, take: Callable[[int, Tensor], object]
) -> None:
    """Run all micro-batches of these shapes, without gradients. `take` receives the last stage's outputs."""
    for index, shape in enumerate(shapes):
        hidden = neighbours.hidden_in and neighbours.hidden_in.receive(shape)
        output = compute(index, hidden)
        if neighbours.hidden_out is None:
            take(index, output)
        else:
            neighbours.hidden_out.send(output.float().contiguous())
    neighbours.flush()


def run_backward(
    neighbours: Neighbours, shapes: Shapes, compute: Compute, loss_of: Callable[[int, Tensor], Tensor]
) -> None:
    """Run all micro-batches, whose hidden states have these shapes, forwards and backwards; gradients add up
    in the parameters. `loss_of` computes a scalar loss from the last stage's output."""
    in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}

    def go_forward(index: int) -> None:
        hidden = neighbours.hidden_in and neighbours.hidden_in.receive(shapes[index]).requires_grad_()
        output = compute(index, hidden)
        if neighbours.hidden_out is None:
            output = loss_of(index, output)
        else:
            output = output.float()  # channels carry float32
            neighbours.hidden_out.send(output.detach().contiguous())
        in_flight[index] = hidden, output

    def go_backward(index: int) -> None:
        hidden, output = in_flight.pop(index)
        gradient = neighbours.gradient_in and neighbours.gradient_in.receive(shapes[index])
        if output.requires_grad:  # false in a first stage without trainable parameters
            output.backward(gradient)
        if neighbours.gradient_out is not None:
            assert hidden is not None
            assert hidden.grad is not None
            neighbours.gradient_out.send(hidden.grad.contiguous())

    num_micro_batches = len(shapes)
    warm_up = min(num_micro_batches, neighbours.after)
    for index in range(warm_up):
        go_forward(index)
    for index in range(num_micro_batches - warm_up):
        go_forward(index + warm_up)
        go_backward(index)
    for index in range(num_micro_batches - warm_up, num_micro_batches):
        go_backward(index)
    neighbours.flush()
