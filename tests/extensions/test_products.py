"""Products with curvature matrices: right for any number of directions, at the cost of as many single products."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

import pytest
import torch
from checks import Calls, columns_per_sweep
from torch import nn
from torch.testing import assert_close

import curvopt.extensions
from curvopt import CurvoptError, backpack, extend
from curvopt.core.products.outer import Outer
from curvopt.extensions import GGNMP, HMP, PCHMP, BatchGrad, EigenDiagonal
from curvopt.testing import Reference, check


def network() -> nn.Sequential:
    conv = nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2), nn.Sigmoid()
    return nn.Sequential(*conv, nn.Flatten(), nn.Linear(18, 3)).double()


def test_chunks_of_columns_share_one_product():
    model, x, y = network(), torch.randn(12, 2, 4, 4).double(), torch.arange(12) % 3
    reference = Reference(model, x, lambda z: nn.functional.cross_entropy(z, y))
    extend(model)
    sizes = {}
    for columns in (None, 1, 2):
        with columns_per_sweep(columns), backpack(GGNMP(), HMP()):
            extend(nn.CrossEntropyLoss())(model(x), y).backward()
        for name, p in model.named_parameters():
            v = torch.randn(2, *p.shape).double()
            for field, matrix in {"ggnmp": reference.ggn(name), "hmp": reference.hessian(name)}.items():
                product = getattr(p, field)
                assert_close(product(v).flatten(1), v.flatten(1) @ matrix)
                size = len(pickle.dumps(product))
                if p.dim() > 1:  # the inputs of the layer are kept once, however many chunks there are
                    assert size < 1.2 * sizes.setdefault((name, field), size)


@pytest.mark.parametrize("extension", [GGNMP, HMP, PCHMP])
def test_a_single_vector_needs_no_leading_axis(extension: type):
    model = extend(network())
    with backpack(extension()):
        extend(nn.CrossEntropyLoss())(model(torch.randn(3, 2, 4, 4).double()), torch.tensor([0, 2, 1])).backward()
    for p in model.parameters():
        product, v = getattr(p, extension.field), torch.randn(2, *p.shape).double()
        assert_close(torch.stack([product(v[0]), product(v[1])]), product(v))
        with pytest.raises(CurvoptError, match=r"expected directions of shape \['V', .*got"):
            product(v[None])


def test_products_of_embeddings_hold_no_array_of_their_size_for_each_sample():
    model = extend(nn.Sequential(nn.Embedding(500, 4), nn.Flatten(), nn.Linear(12, 3)))
    with backpack(GGNMP()):
        extend(nn.CrossEntropyLoss())(model(torch.randint(500, (8, 3))), torch.randint(3, (8,))).backward()
    v = torch.randn(2, 500, 4)
    with Calls() as calls:
        model[0].weight.ggnmp(v)
    assert calls.largest() <= v.numel()


def seconds(call: Callable[[], object]) -> float:
    """The least of some runs, on this process' clock."""

    def once() -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    return min(once() for _ in range(7))


def test_several_directions_cost_no_more_than_each_alone():
    left, right = torch.randn(10, 256, 1, 1, 20), torch.randn(256, 1, 1, 784)
    jacobian, v = Outer(left, right, torch.Size((20, 784))), torch.randn(5, 20, 784)
    together, alone = seconds(lambda: jacobian.matmul(v)), seconds(lambda: [jacobian.matmul(u[None]) for u in v])
    assert together < 3 * alone  # much room for a busy machine: a bad order of the products takes 20 times as long


def test_products_go_by_a_name_of_ones_own():
    model = extend(network())
    extensions = [GGNMP("mine"), HMP(savefield="its"), PCHMP("clipped"), PCHMP(savefield="absolute", modify="abs")]
    with backpack(*extensions):
        extend(nn.CrossEntropyLoss())(model(torch.randn(3, 2, 4, 4).double()), torch.tensor([0, 2, 1])).backward()
    for p in model.parameters():
        v = torch.randn_like(p)
        least, *above = [(v * vars(p)[field](v)).sum() for field in ("mine", "clipped", "absolute")]
        assert least <= above[0] * (1 + 1e-9) and above[0] <= above[1] * (1 + 1e-9)
        assert vars(p)["its"](v).shape == p.shape and not hasattr(p, "pchmp")
    assert check(network(), nn.CrossEntropyLoss(), torch.randn(3, 2, 4, 4), torch.tensor([0, 2, 1]), [GGNMP("mine")])


def test_fields_have_the_name_of_backpack():
    for name in set(curvopt.extensions.__all__) - {"Extension"}:
        kind = getattr(curvopt.extensions, name)
        extension = kind({}, BatchGrad.columns) if kind is EigenDiagonal else kind()
        assert extension.savefield == extension.field == kind.field
        extension.savefield = "mine"
        assert extension.field == "mine" != kind.field
