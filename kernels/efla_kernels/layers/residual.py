"""The residual stream h between a norm that reads it and the linear that adds to it.

The gradients of these two readers of h must be summed. Autograd would use an elementwise kernel over three tensors of
h's size; `Stream` passes the second gradient to `norm_linear`, whose backward kernel adds it to the first.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Stream(NamedTuple):
    """h [..., D] as `norm_linear` returns it: h = values + link.

    Attributes:
        values: h itself [..., D], without gradient.
        link: zeros [N, D] for N rows, stored as one number; it takes h's gradient.
    """

    values: Tensor
    link: Tensor

    def add(self, update: Tensor) -> Tensor:
        """h + update [..., D]."""
        return self.values + self.link.view(self.values.shape) + update

    def rows(self) -> tuple[Tensor, Tensor]:
        """values and link as [N, D]."""
        return self.values.reshape(self.link.shape), self.link

    def check(self, x: Tensor, width: int) -> None:
        """Raise ValueError unless a linear's result for x [..., *], `width` wide, can be added."""
        shape = (*x.shape[:-1], width)
        if self.values.shape != shape or self.values.dtype != x.dtype:
            raise ValueError(
                f"residual: expected a stream {x.dtype} {list(shape)}, as the result, got {self.values.dtype} "
                f"{list(self.values.shape)}"
            )
