"""The residual stream between a norm that has read it and the map whose result is added to it.

Two read a stream h, the norm in front of a mixer or an MLP and the sum behind it, and its gradient has a part from
either. Autograd would add them in a pass of its own: three tensors of h's size. `Stream` hands the second part back to
`norm_linear`, which adds it where it forms the first.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Stream(NamedTuple):
    """h = values + link [..., D], as `norm_linear` returns it.

    Attributes:
        values: h itself, [..., D], to autograd a constant.
        link: zeros [N, D], N rows, held by one number; what takes h's gradient.
    """

    values: Tensor
    link: Tensor

    def plus(self, update: Tensor) -> Tensor:
        """h + update [..., D]."""
        return self.values + self.link.view(self.values.shape) + update

    def rows(self) -> tuple[Tensor, Tensor]:
        """Both as [N, D]."""
        return self.values.reshape(self.link.shape), self.link

    def check(self, update: Tensor, width: int) -> None:
        """Raise ValueError where the result of a map of `update` [..., *] to `width` numbers cannot be added."""
        shape = (*update.shape[:-1], width)
        if self.values.shape != shape or self.values.dtype != update.dtype:
            raise ValueError(
                f"onto: expected a stream {update.dtype} {list(shape)}, as the result, got {self.values.dtype} "
                f"{list(self.values.shape)}"
            )
