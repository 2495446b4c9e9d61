"""Norms, gates and rotations of a few rows in C, against torch."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace

import pytest
import torch

from trialogue.engine import between
from trialogue.engine.between import Between, gate, normalize, rotate


@pytest.fixture
def kernels() -> Between:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    found = between.load_between()
    assert found is not None
    return found


@pytest.mark.parametrize("width", [2, 16, 38, 64])
@pytest.mark.parametrize("rows", [1, 5])
def test_they_compute_what_torch_does(rows, width, kernels):
    chance = torch.Generator().manual_seed(width)
    # From nearly nothing to where a logistic function is 0 or 1.
    both = torch.randn(rows, 2 * width, generator=chance) * torch.logspace(-3, 2, 2 * width)
    weight = torch.randn(width, generator=chance)
    heads = torch.randn(rows, 7, width, generator=chance)[:, :4]  # rows that lie apart
    angles = torch.randn(2, rows, 1, width, generator=chance)
    for one, other in (
        (normalize(heads, weight, 1e-5, kernels), normalize(heads, weight, 1e-5, None)),
        (gate(both, kernels), gate(both, None)),
        (rotate(heads, *angles, kernels), rotate(heads, *angles, None)),
    ):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_kernels_that_compute_something_else_are_refused(kernels):
    assert between.are_right(kernels)
    for name, output in (("normalize", 2), ("gate", 1), ("rotate", 3)):

        def spoiled(*arguments: int, name: str = name, output: int = output) -> int:
            getattr(kernels, name)(*arguments)
            ctypes.memset(arguments[output], 0, 8)
            return 0

        assert not between.are_right(replace(kernels, **{name: spoiled}))


def test_kernels_are_not_given_what_they_would_misread(kernels):
    inputs, weight = torch.zeros(2, 8), torch.zeros(8)
    for wrong in ((inputs.half(), weight), (inputs, torch.zeros(9)), (inputs, weight.half())):
        with pytest.raises(ValueError, match="a kernel cannot take"):
            normalize(*wrong, 1e-5, kernels)
    with pytest.raises(ValueError, match="a kernel cannot take"):
        gate(torch.zeros(8, 2).half(), kernels)
    heads, angles = torch.zeros(2, 3, 8), torch.zeros(2, 1, 8)
    for wrong in (
        (heads.transpose(1, 2), angles, angles),
        (heads, angles[:1], angles),
        (heads.half(), angles, angles),
    ):
        with pytest.raises(ValueError, match="a kernel cannot take"):
            rotate(*wrong, kernels)


def test_many_rows_are_left_to_torch(kernels):
    assert between.find_between(between.FEW) is kernels
    assert between.find_between(between.FEW + 1) is None
