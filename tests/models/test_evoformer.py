"""The Evoformer: its published size, and its algorithms against plain loops."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

import dcpc
from examples.allocator import measured_peak_bytes
from models.evoformer import (
    Evoformer,
    EvoformerConfig,
    GatedAttention,
    OuterProductMean,
    RowAttention,
    TriangleAttention,
    TriangleProduct,
)
from tests.cases import folding_models as folding

TINY = folding.TINY


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# The sum over the layers of algorithms 7 to 15 at c_m 256, c_z 128: 88M for 48 blocks.
def test_a_trunk_of_48_blocks_has_the_size_of_its_algorithms():
    with torch.device("meta"):
        model = Evoformer(EvoformerConfig())
    msa, pair, opm = 256, 128, 32

    def attention(dim: int, inner: int) -> int:
        return 3 * dim * inner + (dim + 1) * inner + (inner + 1) * dim

    row = 2 * msa + 2 * pair + 8 * pair + attention(msa, 256)
    column = 2 * msa + attention(msa, 256)
    outer = 2 * msa + 2 * (msa + 1) * opm + (opm**2 + 1) * pair
    product = 2 * 2 * pair + 6 * (pair + 1) * pair
    triangle = 2 * pair + 4 * pair + attention(pair, 128)
    transitions = sum(2 * d + (d + 1) * 4 * d + (4 * d + 1) * d for d in (msa, pair))
    block = row + column + outer + 2 * product + 2 * triangle + transitions
    assert count(model.blocks[0]) == block == 1_829_952
    assert count(model.blocks) == 48 * block == 87_837_696


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    module = module.double()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module


def test_outer_product_mean_is_the_mean_over_sequences():
    part = randomised(OuterProductMean(TINY))
    msa = torch.randn(1, 5, 4, TINY.msa_dim, dtype=torch.float64)
    a, b = part.left(part.norm(msa))[0], part.right(part.norm(msa))[0]
    for i, j in ((0, 3), (2, 1)):
        mean = torch.stack([torch.outer(a[s, i], b[s, j]) for s in range(5)]).mean(0)
        assert torch.allclose(part(msa)[0, i, j], part.out(mean.flatten()))


def test_triangle_products_go_over_the_third_residue():
    pair = torch.randn(1, 5, 5, TINY.pair_dim, dtype=torch.float64)
    for outgoing in (True, False):
        part = randomised(TriangleProduct(TINY, outgoing))
        x = part.norm(pair)[0]
        a = torch.sigmoid(part.left_gate(x)) * part.left(x)
        b = torch.sigmoid(part.right_gate(x)) * part.right(x)
        i, j = 1, 4
        terms = [a[i, k] * b[j, k] if outgoing else a[k, i] * b[k, j] for k in range(5)]
        out = part.out(part.product_norm(torch.stack(terms).sum(0)))
        assert torch.allclose(part(pair)[0, i, j], torch.sigmoid(part.gate(x[i, j])) * out)


def spelled(attention: torch.nn.Module, rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Gated attention of one row `[R, D]` with bias `[R, R, H]`, head by head."""
    heads = []
    for h in range(attention.heads):
        part = slice(h * 4, h * 4 + 4)
        q, k, v = (rows @ m.weight[part].T for m in (attention.q, attention.k, attention.v))
        heads.append(torch.softmax(q @ k.T / 2 + bias[..., h], -1) @ v)
    return attention.out(torch.sigmoid(attention.gate(rows)) * torch.cat(heads, -1))


def test_row_attention_is_biased_by_pairs():
    part = randomised(RowAttention(TINY))
    msa = torch.randn(1, 3, 5, TINY.msa_dim, dtype=torch.float64)
    pair = torch.randn(1, 5, 5, TINY.pair_dim, dtype=torch.float64)
    bias = part.bias(part.pair_norm(pair))[0]
    expected = spelled(part.attention, part.norm(msa)[0, 2], bias)
    assert torch.allclose(part(msa, pair)[0, 2], expected)


def test_triangle_attention_goes_along_rows_or_columns():
    pair = torch.randn(1, 5, 5, TINY.pair_dim, dtype=torch.float64)
    for starting in (True, False):
        part = randomised(TriangleAttention(TINY, starting))
        x = part.norm(pair)[0] if starting else part.norm(pair)[0].transpose(0, 1)
        found = part(pair)[0]
        expected = spelled(part.attention, x[3], part.bias(x))
        assert torch.allclose(found[3] if starting else found[:, 3], expected)


def test_only_hidden_residues_count_in_the_loss():
    model, inputs = folding.model(), folding.data(folding.POINTS[0])
    loss = model(**inputs)
    seen = inputs["true_msa"].where(inputs["hidden"], 0)
    assert model(**inputs | {"true_msa": seen}) == loss
    assert model(**inputs | {"hidden": ~inputs["hidden"]}) != loss


ROOM_BYTES = 1024  # scalars, and the number of tokens of a batch
CROP = {"sequences": 12, "residues": 20}


def compiled_trunk() -> dcpc.CompiledModel:
    buckets = dcpc.Buckets(inputs=folding.INPUTS, sizes=[CROP])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcpc.compile(
            folding.model(), buckets, backend="eager", device="cpu", sp=1, recompute="none"
        )


def repeated(self: GatedAttention, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gated attention whose bias has memory for each row of the alignment."""
    q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
    mask = None if bias is None else bias[:, None] + x.new_zeros(x.shape[1], 1, 1, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(2, 3).flatten(3)
    return self.out(torch.sigmoid(self.gate(x)) * out)


def test_biases_are_never_repeated_for_the_rows_that_share_them(monkeypatch):
    found, losses = {}, {}
    for name in ("shared", "repeated"):
        if name == "repeated":
            monkeypatch.setattr(GatedAttention, "forward", repeated)
        compiled = compiled_trunk()
        for batch in (1, 3):
            sizes = {"batch": batch, **CROP}
            inputs = folding.data(sizes)
            found[name, batch] = compiled.predict(sizes)
            losses[name, batch] = compiled(**inputs)
            losses[name, batch].backward()
            peak_bytes = measured_peak_bytes(lambda c=compiled, x=inputs: c(**x).backward())
            assert abs(peak_bytes - found[name, batch].peak_bytes) < ROOM_BYTES
    rows, columns = CROP["sequences"], CROP["residues"]
    of_rows, of_pairs = folding.TINY.msa_heads, folding.TINY.pair_heads
    fewer = of_rows * (rows - 1) + 2 * of_pairs * (columns - 1)
    for batch in (1, 3):
        shared, other = ((found[n, batch], losses[n, batch]) for n in ("shared", "repeated"))
        torch.testing.assert_close(shared[1], other[1], rtol=1e-13, atol=0)
        fewer_bytes = batch * fewer * columns**2 * 8
        assert other[0].saved_bytes - shared[0].saved_bytes == fewer_bytes
        assert other[0].peak_bytes - shared[0].peak_bytes >= fewer_bytes
