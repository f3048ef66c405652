"""CUDA attention kernels: each family, thread schedules, and values behind masks.

The grid for all backends is in test_attention.py, where the kernel family is selected automatically.
"""

import pytest
import torch

import transformer_kernels as tk
from benchmarks.compilers import cuda_launches
from tests.support.arguments import dtype_id, normal
from tests.support.parity import check_parity, require
from transformer_kernels.backends import cuda as _extension
from transformer_kernels.ops.attention import _compiled, prepare

KERNELS = _compiled.Kernels.on(_extension)
HALF = (torch.float16, torch.bfloat16)
SCHEDULES = [("lowest_first", 0), ("one_warp_ahead", 1), ("one_warp_ahead", 2), ("random", 1), ("random", 2)]


@pytest.fixture(autouse=True)
def _cuda_backend(device):
    require("attention", "cuda", device, torch.float32)


SMALL = "99 KiB"
"""The one mixture due to a limit of shared memory: for 129 to 256 keys and head dimensions up to 64, the short forward
and the general backward pass. Every other launch fits on every GPU, or is rejected."""


@pytest.fixture
def path(request, monkeypatch):
    monkeypatch.setattr(_compiled, "path", "auto" if request.param == SMALL else request.param)
    if request.param in ("sm90", "sm90_persistent", SMALL):
        monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "86" if request.param == SMALL else "90")
    return request.param


@pytest.fixture
def schedule(request):
    """Runs the threads of a block in another order."""
    if not _extension.emulating():
        pytest.skip("schedules are controlled by the emulation only")
    _extension.load().set_schedule(*request.param)
    yield
    _extension.load().set_schedule("lowest_first", 0)


def make(dtype, device, lengths, *, batch=2, heads=(2, 2), width=32):
    return {
        name: normal(batch, count, length, width, dtype=dtype, device=device, seed=seed)
        for seed, (name, count, length) in enumerate(
            [("q", heads[0], lengths[0]), ("k", heads[1], lengths[1]), ("v", heads[1], lengths[1])]
        )
    }


def padding(batch, keys, device):
    """The first sequence has no padding, the others have, the last also has gaps and whole tiles of padding."""
    kept = torch.arange(keys) < torch.linspace(keys, max(1, keys // 3), batch).long()[:, None]
    kept[-1, 2::7] = False
    return kept.to(device)


both_paths = pytest.mark.parametrize("path", ["general", "short"], indirect=True)
half = pytest.mark.parametrize("dtype", HALF, ids=dtype_id)


@both_paths
@half
@pytest.mark.parametrize("width", [24, 64])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (130, 70), (70, 200)], ids=str)
def test_each_family_matches_reference(path, dtype, width, lengths, device):
    tensors = make(dtype, device, lengths, batch=1, width=width)
    check_parity("attention", "cuda", tensors, {"causal": True, "return_lse": True})


@pytest.mark.parametrize("path", ["general"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "width", "length", "options"),
    [
        (torch.bfloat16, 64, 200, {"causal": True}),
        (torch.float16, 56, 130, {"dropout_p": 0.3, "window": 50}),
        (torch.float16, 64, 260, {"causal": True, "cu_seqlens": [0, 40, 41, 170, 250]}),
        (torch.bfloat16, 48, 300, {"softcap": 1.5, "causal": True, "dropout_p": 0.2}),
    ],
    ids=str,
)
def test_warps_take_32_queries_where_blocks_fill_the_gpu(path, dtype, width, length, options, device):
    if not _extension.emulating():
        pytest.skip("eight blocks fill the emulated GPU only")
    heads = -(-8 // -(-length // 128))
    tensors = make(dtype, device, (length, length), batch=1, heads=(heads, 1), width=width)
    tensors = {name: value.detach() for name, value in tensors.items()}
    tensors["key_padding_mask"] = padding(2, length, device)[1:]
    if starts := options.get("cu_seqlens"):
        options = {**options, "cu_seqlens": torch.tensor(starts, dtype=torch.int32, device=device)}
    _extension.load().reset_counters()
    check_parity("attention", "cuda", tensors, {"return_lse": True, **options})
    launched = {cuda_launches.template(name) for name in _extension.load().launches()}
    assert any(
        kernel == "attention_forward_kernel" and arguments.endswith((",2,false", ",2,0"))
        for kernel, arguments in launched
    )


@pytest.mark.parametrize("path", ["general", "short", SMALL], indirect=True)
@half
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_each_family_with_everything_together(path, dtype, causal, device):
    tensors = make(dtype, device, (75, 150), heads=(4, 2), width=40)
    tensors["key_padding_mask"] = padding(2, 150, device)
    tensors["attn_bias"] = torch.randn(2, 1, 75, 150, device=device)
    options = {"causal": causal, "window": 50, "dropout_p": 0.3, "return_lse": True}
    check_parity("attention", "cuda", tensors, options, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["general", "sm90"], indirect=True)
@half
def test_16_bits_use_a_small_share_of_the_budget(path, dtype, device):
    """With the summation order of tensor cores and the least accurate exponentials: 17 % in fp16, 15 % in bf16."""
    needs_sm90(device)
    shares = []
    for lengths, options in (((64, 600), {}), ((130, 130), {"causal": True}), ((40, 300), {"window": 70})):
        tensors = make(dtype, device, lengths, batch=1, heads=(2, 1), width=64)
        shares.append(check_parity("attention", "cuda", tensors, {"return_lse": True, **options}))
    assert 0.1 < max(shares) <= 0.2


@pytest.mark.parametrize("keys", [8, 28])
def test_one_query_in_float32_has_accurate_exponentials(device, keys):
    """No sum over queries averages errors: ex2.approx's 2 ulp would be 1.5 budgets at ten of 39 lengths."""
    tensors = make(torch.float32, device, (1, keys), batch=1, heads=(1, 1), width=16)
    check_parity("attention", "cuda", tensors, {"return_lse": True})


@both_paths
@half
def test_each_family_reads_misaligned_rows(path, dtype, device):
    tensors = {
        name: torch.randn(1, 2, 70, 59).to(dtype).to(device)[..., 3:36].requires_grad_() for name in ("q", "k", "v")
    }
    check_parity("attention", "cuda", tensors, {"causal": True})


@both_paths
def test_each_family_reads_heads_that_begin_off_16_bytes(path, device):
    """Though the rows of a head are multiples of 16 bytes apart."""
    tensors = {
        name: torch.randn(1, 2, 70 * 32 + 4).half().to(device)[..., :-4].unflatten(-1, (70, 32)).requires_grad_()
        for name in ("q", "k", "v")
    }
    check_parity("attention", "cuda", tensors, {"causal": True})


def needs_sm90(device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU")


sm90 = pytest.mark.parametrize("path", ["sm90"], indirect=True)


@sm90
@half
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(1, 1), (128, 128), (130, 300), (300, 140)], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_sm90_matches_reference(path, dtype, causal, lengths, width, device):
    needs_sm90(device)
    tensors = make(dtype, device, lengths, batch=1, heads=(2, 1), width=width)
    tensors = {name: value.detach() for name, value in tensors.items()}
    check_parity("attention", "cuda", tensors, {"causal": causal, "return_lse": True})


@sm90
@pytest.mark.parametrize("queries", [1, 70])
def test_sm90_takes_odd_strides_of_axes_of_one_element(path, queries, device):
    """They are irrelevant for addresses. This path does not support copies element by element."""
    needs_sm90(device)
    tensors = make(HALF[0], device, (queries, 70), batch=1, heads=(2, 1), width=64)
    strides = {"q": (3, queries * 64, 5 if queries == 1 else 64, 1), "k": (3, 7, 64, 1), "v": (5, 9, 64, 1)}
    odd = {name: value.detach().as_strided(value.shape, strides[name]) for name, value in tensors.items()}
    check_parity("attention", "cuda", odd, {"return_lse": True})


@sm90
@pytest.mark.parametrize(
    ("width", "dtype"), [(32, HALF[0]), (40, HALF[1]), (96, HALF[1]), (192, HALF[1]), (256, HALF[0])]
)
def test_sm90_fills_up_other_widths(path, width, dtype, device):
    needs_sm90(device)
    storage = {
        name: t.detach() for name, t in make(dtype, device, (130, 200), batch=1, heads=(2, 1), width=264).items()
    }
    tensors = {name: value.fill_(float("nan"))[..., :width] for name, value in storage.items()}  # NaN after each row
    for seed, value in enumerate(tensors.values()):
        value.copy_(normal(*value.shape, dtype=dtype, device=device, seed=seed).detach())
    tensors["key_padding_mask"] = padding(1, 200, device)
    check_parity("attention", "cuda", tensors, {"causal": width != 40, "return_lse": True})


@sm90
@pytest.mark.parametrize(("width", "keys"), [(64, 700), (256, 350)])
def test_sm90_fills_each_stage_three_times(path, width, keys, device):
    needs_sm90(device)
    tensors = make(torch.float16, device, (20, keys), batch=1, heads=(1, 1), width=width)
    check_parity("attention", "cuda", {name: value.detach() for name, value in tensors.items()}, {"return_lse": True})


@sm90
@pytest.mark.parametrize("window", [1, 60, (200, 30)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sm90_with_a_window(path, causal, window, device):
    needs_sm90(device)
    tensors = {name: t.detach() for name, t in make(torch.float16, device, (300, 400), batch=1, width=64).items()}
    check_parity("attention", "cuda", tensors, {"causal": causal, "window": window, "return_lse": True})


@sm90
@pytest.mark.parametrize(
    "options", [{"dropout_p": 0.3}, {"softcap": 1.5}, {"scale": -0.2, "softcap": 2.0, "dropout_p": 0.1}], ids=str
)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_sm90_with_dropout_and_softcap(path, options, width, device):
    needs_sm90(device)
    tensors = make(torch.bfloat16, device, (140, 200), batch=1, heads=(2, 1), width=width)
    tensors["key_padding_mask"] = padding(1, 200, device)
    check_parity("attention", "cuda", tensors, {"causal": True, "return_lse": True, **options})


BIASES = {
    "whole": (64, torch.float32, (2, 4, 140, 200), {"dropout_p": 0.2}),
    "broadcast over queries": (96, torch.float32, (2, 1, 1, 200), {"window": 70}),
    "broadcast over batches": (128, torch.bfloat16, (1, 4, 140, 200), {"softcap": 1.5, "dropout_p": 0.2}),
    "at the widest heads": (256, torch.float32, (1, 4, 140, 200), {"causal": True, "dropout_p": 0.2}),
    "of 16 bits at wide heads": (192, torch.bfloat16, (2, 1, 140, 200), {"window": 70}),
}


@sm90
@pytest.mark.parametrize("bias", BIASES)
def test_sm90_with_a_bias(path, bias, device):
    needs_sm90(device)
    width, dtype, shape, options = BIASES[bias]
    tensors = make(torch.bfloat16, device, (140, 200), heads=(4, 2), width=width)
    tensors = {name: value.detach() for name, value in tensors.items()}
    tensors["key_padding_mask"] = padding(2, 200, device)
    tensors["attn_bias"] = normal(*shape, dtype=dtype, device=device, seed=5).detach()
    check_parity("attention", "cuda", tensors, {"return_lse": True, **options})


@sm90
@pytest.mark.parametrize("width", [64, 192])
def test_sm90_with_slopes(path, width, device):
    needs_sm90(device)
    tensors = {
        name: t.detach() for name, t in make(torch.float16, device, (140, 333), heads=(4, 2), width=width).items()
    }
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.004], device=device)
    check_parity("attention", "cuda", tensors, {"alibi_slopes": slopes, "causal": True, "return_lse": True})


@sm90
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str, indirect=True)
def test_sm90_with_padding_under_every_schedule(path, schedule, device):
    tensors = {name: value.detach() for name, value in make(torch.bfloat16, device, (140, 420), width=64).items()}
    mask = tensors["key_padding_mask"] = padding(2, 420, device)
    mask[0, 100:260] = False  # a whole tile of padding between real keys
    for name in "kv":
        tensors[name].masked_fill_(~mask[:, None, :, None], float("nan"))
    check_parity("attention", "cuda", tensors, {"causal": True, "return_lse": True})


@sm90
def test_sm90_reads_a_packed_projection_and_writes_what_backward_needs(path, device):
    projection = torch.randn(2, 200, 3, 2, 64, device=device).to(torch.bfloat16)
    tensors = {name: projection[:, :, i].transpose(1, 2).requires_grad_() for i, name in enumerate("qkv")}
    check_parity("attention", "cuda", tensors, {"causal": True})


@sm90
def test_sm90_refuses_what_it_does_not_do(path, device):
    odd = torch.zeros(1, 1, 8, 9, device=device)  # odd rows are not read in pairs
    for width, bias in ((36, None), (64, odd[..., :8]), (256, odd[..., 1:])):
        with pytest.raises(ValueError, match="the sm90 kernels do not take this call"):
            tk.attention(**make(torch.float16, device, (8, 8), width=width), attn_bias=bias, backend="cuda")


sm90_persistent = pytest.mark.parametrize("path", ["sm90_persistent"], indirect=True)
PERSISTENT = {  # width, lengths and options; padding and packing are of the last batch and of 300 tokens
    "full": (64, (300, 333), {}),
    "causal": (128, (300, 300), {"causal": True}),
    "tiles without keys": (64, (300, 140), {"causal": True}),
    "one tile for each block": (128, (100, 420), {}),
    "window": (96, (300, 400), {"causal": True, "window": 60}),
    "padding": (128, (140, 420), {"key_padding_mask": True}),
    "softcap and dropout": (64, (300, 200), {"softcap": 1.5, "dropout_p": 0.2, "key_padding_mask": True}),
    "options of wide heads": (128, (300, 200), {"scale": -0.2, "softcap": 2.0, "dropout_p": 0.1, "causal": True}),
    "packed": (64, (300, 300), {"cu_seqlens": [0, 30, 31, 150, 290]}),
    "packed, causal": (128, (300, 300), {"cu_seqlens": [0, 128, 256], "causal": True, "dropout_p": 0.2}),
}


def check_persistent(case, dtype, device):
    """Against float64, in a grid of no more than the emulated four blocks; query heads share key heads in pairs."""
    width, lengths, given = PERSISTENT[case]
    tensors = {name: x.detach() for name, x in make(dtype, device, lengths, batch=1, heads=(4, 2), width=width).items()}
    options = {"return_lse": True, **given}
    if options.pop("key_padding_mask", None):
        mask = tensors["key_padding_mask"] = padding(2, lengths[1], device)[1:]
        mask[:, 30:160] = False  # a whole tile of padding between real keys
        for name in "kv":
            tensors[name].masked_fill_(~mask[:, None, :, None], float("nan"))
    if starts := options.get("cu_seqlens"):
        options["cu_seqlens"] = torch.tensor(starts, dtype=torch.int32, device=device)
    if _extension.emulating():
        _extension.load().reset_counters()
    check_parity("attention", "cuda", tensors, options, seed=5)
    assert not _extension.emulating() or _extension.load().counters()["blocks"] == 4


@sm90_persistent
@half
@pytest.mark.parametrize("case", PERSISTENT)
def test_a_persistent_grid_matches_reference(path, dtype, case, device):
    needs_sm90(device)
    check_persistent(case, dtype, device)


@sm90_persistent
@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=str, indirect=True)
@pytest.mark.parametrize("case", ["causal", "tiles without keys", "padding", "packed"])
def test_a_persistent_grid_under_every_schedule(path, schedule, case, device):
    check_persistent(case, torch.bfloat16, device)


@sm90_persistent
def test_a_persistent_grid_refuses_what_it_does_not_do(path, device):
    needs_sm90(device)
    for width, bias in ((136, None), (64, torch.zeros(1, 1, 8, 8, device=device))):
        with pytest.raises(ValueError, match="the sm90 kernels do not take this call"):
            tk.attention(**make(torch.float16, device, (8, 8), width=width), attn_bias=bias, backend="cuda")


@half
@pytest.mark.parametrize("width", [96, 128, 192])
def test_wide_heads_with_everything_together(dtype, width, device):
    tensors = make(dtype, device, (70, 100), heads=(2, 1), width=width)
    tensors["key_padding_mask"] = padding(2, 100, device)
    tensors["attn_bias"] = torch.randn(1, 2, 70, 100).to(dtype).to(device).requires_grad_()
    options = {"causal": True, "dropout_p": 0.2, "return_lse": True, "softcap": 1.5 if width == 96 else None}
    check_parity("attention", "cuda", tensors, options)


@both_paths
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str, indirect=True)
def test_every_schedule_gives_the_same_bits(path, schedule, device):
    tensors = make(torch.bfloat16, device, (100, 140), heads=(2, 1))
    tensors["key_padding_mask"] = padding(2, 140, device)

    def once():
        out = tk.attention(**tensors, causal=True, dropout_p=0.2, backend="cuda")
        return [out, *torch.autograd.grad(out.sum(), [tensors[name] for name in "qkv"])]

    torch.manual_seed(0)
    got = once()
    _extension.load().set_schedule("lowest_first", 0)
    torch.manual_seed(0)
    assert all(torch.equal(want, value) for want, value in zip(once(), got, strict=True))
    check_parity("attention", "cuda", tensors, {"causal": True, "dropout_p": 0.2})


@pytest.mark.parametrize("schedule", SCHEDULES[1:4:2], ids=str, indirect=True)
def test_float32_under_other_schedules(schedule, device):
    tensors = make(torch.float32, device, (70, 90), heads=(2, 1), batch=1)
    tensors["attn_bias"] = torch.randn(1, 1, 1, 90, device=device).requires_grad_()
    check_parity("attention", "cuda", tensors, {"causal": True})


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_shared_memory_has_no_bank_conflicts(width, device):
    if not _extension.emulating():
        pytest.skip("counted by the emulation")
    tensors = make(torch.bfloat16, device, (64, 130), batch=1, width=width)
    _extension.load().reset_counters()
    tk.attention(**tensors, backend="cuda").sum().backward()
    counters = _extension.load().counters()
    assert counters["matrix_loads"] > 0
    assert counters["bank_conflicts"] == 0


def work_of(tensors, **options):
    """Matrix instructions and bytes copied to shared memory in a forward and a backward pass."""
    if not _extension.emulating():
        pytest.skip("counted by the emulation")
    _extension.load().reset_counters()
    tk.attention(**tensors, **options, backend="cuda").sum().backward()
    counters = _extension.load().counters()
    return counters["matrix_multiplies"], counters["async_copy_bytes"]


@pytest.mark.parametrize("path", ["general", "short", "sm90"], indirect=True)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_padding_is_not_computed(path, biased, device):
    """Tiles of padding are skipped in every pass, between and after real keys."""
    if biased and path != "general":
        pytest.skip("only the general kernels give the bias a gradient")
    needs_sm90(device) if path == "sm90" else None
    work = []
    for length, real in ((128, [(0, 100)]), (256, [(0, 100)]), (256, [(0, 64), (192, 228)])):
        step = 2 if path == "sm90" else 1  # its tiles are twice as long
        tensors = make(torch.bfloat16, device, (64, step * length), batch=1, heads=(1, 1), width=64)
        kept = torch.zeros(1, step * length, dtype=torch.bool)
        for first, end in real:
            kept[:, step * first : step * end] = True
        tensors["key_padding_mask"] = kept.to(device)
        if biased:
            tensors["attn_bias"] = torch.zeros(1, 1, 1, length, device=device).requires_grad_()
        work.append(work_of(tensors)[0])
    assert work[0] == work[1] == work[2] > 0


PACKINGS = {  # (where sequences begin, tokens): borders on and off the tiles, sequences within a tile, filler behind
    "aligned": ([0, 128, 256], 256),
    "within tiles": ([0, 3, 20, 21, 60, 130], 130),
    "long and short": ([0, 1, 150, 150, 190], 200),
    "filler for whole tiles": ([0, 30, 70], 270),
}


@pytest.fixture(params=PACKINGS)
def packing(request, device):
    starts, tokens = PACKINGS[request.param]
    return torch.tensor(starts, dtype=torch.int32, device=device), tokens


@pytest.mark.parametrize("path", ["general", "sm90"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 40}], ids=str)
def test_packed_sequences_in_each_family(path, options, packing, device):
    needs_sm90(device) if path == "sm90" else None
    cu_seqlens, tokens = packing
    tensors = make(torch.bfloat16, device, (tokens, tokens), batch=1, heads=(2, 1), width=64)
    check_parity("attention", "cuda", tensors, {**options, "cu_seqlens": cu_seqlens, "return_lse": True})


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 128), (torch.float32, 160), (torch.float16, 192)], ids=str
)
def test_packed_sequences_in_other_tile_shapes(dtype, width, device):
    tensors = make(dtype, device, (100, 100), batch=1, heads=(2, 1), width=width)
    tensors["key_padding_mask"] = (torch.arange(100, device=device) % 7 != 3)[None]
    tensors["attn_bias"] = torch.randn(1, 2, 1, 100).to(device, dtype).requires_grad_()
    cu_seqlens = torch.tensor([0, 3, 48, 48, 90], dtype=torch.int32, device=device)
    check_parity("attention", "cuda", tensors, {"cu_seqlens": cu_seqlens, "dropout_p": 0.2, "return_lse": True})


@pytest.mark.parametrize("path", ["general", "sm90"], indirect=True)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_sequences_cost_what_each_costs_alone(path, causal, device):
    """If boundaries coincide with tiles, packed sequences need the work of a batch, tokens after the last one none.

    With more heads the emulated GPU would be filled by warps of 32 queries, which compute more above the diagonal.
    """
    needs_sm90(device) if path == "sm90" else None
    batched = make(torch.bfloat16, device, (128, 128), batch=3, heads=(1, 1), width=64)
    packed = {name: torch.cat(list(x.detach()), dim=1)[None].requires_grad_() for name, x in batched.items()}
    cu_seqlens = torch.tensor([0, 128, 256, 384], dtype=torch.int32, device=device)
    alone = work_of(batched, causal=causal)
    assert work_of(packed, causal=causal, cu_seqlens=cu_seqlens) == alone
    multiplies, _ = work_of(
        {name: torch.cat([x.detach(), x.detach()], dim=2).requires_grad_() for name, x in packed.items()},
        causal=causal,
        cu_seqlens=cu_seqlens,
    )
    assert multiplies == alone[0]


def test_bias_gradient_of_packed_sequences_costs_what_each_costs_alone(device):
    tensors = make(torch.bfloat16, device, (256, 256), batch=1, heads=(1, 1), width=64)
    bias = torch.zeros(1, 1, 256, 256, device=device)
    work = []
    for starts in ([0, 256], [0, 64, 128, 192, 256]):
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        work.append(work_of({**tensors, "attn_bias": bias.requires_grad_()}, cu_seqlens=cu_seqlens))
    assert work[0][0] == 4 * work[1][0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("path", ["general", "sm90"], indirect=True)
def test_no_sequence_reads_another(path, poison, device):
    """Non-finite values of a sequence do not reach others in the same tile, and reach the rows that see them."""
    needs_sm90(device) if path == "sm90" else None
    clean = make(torch.bfloat16, device, (300, 300), batch=1, heads=(1, 1), width=64)
    cu_seqlens = torch.tensor([0, 90, 180, 290], dtype=torch.int32, device=device)
    second = torch.arange(300, device=device).ge(90) & torch.arange(300, device=device).lt(180)
    non_finite = second.clone()
    non_finite[290:] = True  # after the last sequence
    cotangent = normal(1, 1, 300, 64, dtype=torch.bfloat16, device=device, seed=7).detach()
    results = []
    for tensors, dout in ((clean, cotangent), ({}, cotangent.masked_fill(non_finite[:, None], poison))):
        if not tensors:
            tensors = {name: x.detach().masked_fill(non_finite[:, None], poison) for name, x in clean.items()}
            tensors = {name: x.requires_grad_() for name, x in tensors.items()}
        out, lse = tk.attention(**tensors, cu_seqlens=cu_seqlens, return_lse=True, backend="cuda")
        out.backward(dout)
        results.append([out.detach(), lse.detach()[..., None], *(x.grad for x in tensors.values())])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want[:, :, ~non_finite], got[:, :, ~non_finite])
        assert not torch.isfinite(got[:, :, second]).all(dim=-1).any()


@pytest.mark.parametrize("name", ["v", "dout"])
def test_a_sequence_keeps_its_own_nan(name, device):
    """One non-finite value in a boundary tile reaches all rows of its sequence that see it, and no other row."""
    tensors = {**make(torch.float16, device, (100, 100), batch=1, heads=(1, 1)), "dout": torch.ones(1, 1, 100, 32)}
    dout = tensors.pop("dout").to(device).half()
    (dout if name == "dout" else tensors[name].data)[0, 0, 50, 3] = float("nan")
    cu_seqlens = torch.tensor([0, 40, 70, 100], dtype=torch.int32, device=device)
    out = tk.attention(**tensors, cu_seqlens=cu_seqlens, backend="cuda")
    out.backward(dout)
    for got in (out.detach() if name == "v" else tensors["v"].grad, tensors["k"].grad):
        assert torch.isnan(got[0, 0, 40:70]).any(dim=-1).all()
        assert torch.isfinite(got[0, 0, :40]).all() and torch.isfinite(got[0, 0, 70:]).all()


@pytest.mark.parametrize("path", ["general", "sm90"], indirect=True)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str, indirect=True)
def test_packed_sequences_under_every_schedule(path, schedule, device):
    tensors = make(torch.bfloat16, device, (150, 150), batch=1, heads=(2, 1), width=64)
    cu_seqlens = torch.tensor([0, 40, 41, 130], dtype=torch.int32, device=device)
    options = {"cu_seqlens": cu_seqlens, "causal": True, "return_lse": True, "dropout_p": 0.2}
    check_parity("attention", "cuda", tensors, options)


def test_a_scale_of_zero_or_below(device):
    for scale in (0.0, -0.2):
        tensors = make(torch.float16, device, (40, 70), batch=1, width=80)
        check_parity("attention", "cuda", tensors, {"scale": scale, "causal": True})


@pytest.mark.parametrize("path", ["short"], indirect=True)
def test_short_kernels_refuse_what_they_cannot_hold(path, device):
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32, device=device)
    for lengths, options in (((1, 257), {}), ((8, 8), {"cu_seqlens": cu_seqlens})):
        tensors = make(torch.float16, device, lengths, batch=1)
        with pytest.raises(ValueError, match="up to 256 queries and keys that are not packed"):
            tk.attention(**tensors, **options, backend="cuda")


@sm90
def test_sm90_kernels_refuse_another_gpu(path, device, monkeypatch):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        pytest.skip("this is a Hopper GPU")
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "100")
    with pytest.raises(ValueError, match="run on sm_90 and in a build for sm_90a only; this is sm_"):
        tk.attention(**make(torch.float16, device, (8, 8), width=64), backend="cuda")


ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
WITH_99_KIB = (86, 89, 120)


@pytest.fixture(params=ARCHITECTURES, ids="sm_{}".format)
def architecture(request, monkeypatch, unplanned):
    if not _extension.emulating():
        pytest.skip("a device is what it is")
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", str(request.param))
    return request.param


@pytest.mark.parametrize(
    ("dtype", "lengths", "width", "heads", "biased"),
    [
        (torch.float16, (40, 256), 64, 1, False),
        (torch.bfloat16, (40, 250), 32, 1, False),
        (torch.float16, (30, 50), 256, 1, False),
        (torch.float16, (20, 300), 128, 1, False),
        (torch.float32, (20, 40), 128, 1, False),
        (torch.bfloat16, (40, 120), 64, 1, False),
        (torch.float16, (20, 60), 24, 1, False),
        (torch.bfloat16, (260, 40), 128, 3, False),
        (torch.bfloat16, (20, 70), 256, 1, True),
        (torch.float16, (20, 130), 64, 1, True),
        (torch.float32, (20, 40), 128, 1, True),
        (torch.float32, (33, 40), 64, 1, True),
    ],
    ids=str,
)
def test_every_gpu_has_kernels_that_fit(architecture, dtype, lengths, width, heads, biased, device):
    """The emulation rejects a launch above its architecture's shared memory, as a device does."""
    if architecture == 75 and (dtype is torch.bfloat16 or width * dtype.itemsize > 256):
        dtype, width = torch.float16, min(width, 128)
    tensors = make(dtype, device, lengths, batch=1, heads=(heads, 1), width=width)
    if biased:
        tensors["attn_bias"] = normal(1, 1, *lengths, dtype=dtype, device=device, seed=5)
    check_parity("attention", "cuda", tensors, {"causal": True})


@pytest.mark.parametrize(
    ("dtype", "width", "reason"),
    [
        (
            torch.bfloat16,
            32,
            r"bfloat16 needs compute capability 8\.0 or newer \(Ampere\); this GPU has 7\.5: use float16",
        ),
        (
            torch.float16,
            129,
            "in float16 above 128 the kernels need 98848 bytes .* gives a block 65536; use backend='torch'",
        ),
        (
            torch.float32,
            65,
            "in float32 above 64 the kernels need 98848 bytes .* 65536; use float16 or backend='torch'",
        ),
    ],
)
def test_sm_75_refuses_what_it_lacks(dtype, width, reason, device, monkeypatch, unplanned):
    if not _extension.emulating():
        pytest.skip("a device is what it is")
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "75")
    tensors = make(dtype, device, (8, 8), width=width)
    with pytest.raises(tk.UnsupportedByBackend, match=reason):
        tk.attention(**tensors, backend="cuda")
    monkeypatch.setattr(_compiled, "SHARED_BYTES", {})
    if dtype is not torch.bfloat16:
        with pytest.raises(RuntimeError, match="98848 bytes of shared memory: a block of sm_75 has at most 65536"):
            tk.attention(**tensors, backend="cuda")


def test_what_fits_nowhere_is_refused_before_a_launch(architecture, device, monkeypatch):
    if architecture == 75:
        pytest.skip("float32 ends at head dimension 64")
    tensors = make(torch.float32, device, (20, 40), batch=1, heads=(1, 1), width=192)
    if architecture not in WITH_99_KIB:
        check_parity("attention", "cuda", tensors)
        return
    with pytest.raises(
        tk.UnsupportedByBackend, match="131456 bytes of shared memory and this GPU gives a block 101376"
    ):
        tk.attention(**tensors, backend="cuda")
    monkeypatch.setattr(_compiled, "SHARED_BYTES", {})  # the limit is what the launch needs
    out = tk.attention(**tensors, backend="cuda")
    with pytest.raises(RuntimeError, match=r"131088 bytes of shared memory: a block of sm_.* at most 101376"):
        out.sum().backward()
    monkeypatch.setattr(_compiled, "path", "short")
    tensors = make(torch.float16, device, (8, 256), batch=1, heads=(1, 1), width=64)
    out = tk.attention(**tensors, backend="cuda")
    with pytest.raises(
        ValueError, match="need 165120 bytes of shared memory for this call; this GPU gives a block 101376"
    ):
        out.sum().backward()


def test_the_emulation_knows_its_architectures(device, monkeypatch):
    if not _extension.emulating():
        pytest.skip("a device is what it is")
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "70")
    with pytest.raises(RuntimeError, match="EMULATE_ARCH is 70; the emulation knows 75, 80, 86, 89, 90, 100 and 120"):
        tk.attention(**make(torch.float16, device, (8, 8)), backend="cuda")


def gradient_views(case, tensors, device):
    """A buffer of NaN and views of it, each of the shape of q, k or v, that leave gaps between rows and heads."""
    (batch, heads, length, width), key_heads = tensors["q"].shape, tensors["k"].shape[1]
    all_heads, dtype = heads + 2 * key_heads, tensors["q"].dtype
    first = {"packed": 0, "gaps on 16 bytes": 8, "misaligned": 3}[case]
    columns = width + {"packed": 0, "gaps on 16 bytes": 16, "misaligned": 8}[case]
    buffer = torch.full((batch, length, all_heads, columns), float("nan"), dtype=dtype, device=device)
    joined = buffer[..., first : first + width].transpose(1, 2)  # (B, all heads, L, D)
    return buffer, list(joined.split([heads, key_heads, key_heads], dim=1))


@pytest.mark.parametrize("case", ["packed", "gaps on 16 bytes", "misaligned"])
@pytest.mark.parametrize(
    ("path", "dtype", "width"),
    [
        ("general", torch.float32, 32),
        ("general", torch.bfloat16, 40),
        ("general", torch.float16, 160),
        ("short", torch.bfloat16, 64),
        ("short", torch.float16, 24),
    ],
    ids=str,
    indirect=["path"],
)
def test_gradients_are_written_where_they_are_wanted(case, path, dtype, width, device):
    """Into views of any strides: the same bits as in new tensors, without writes outside."""
    tensors = {name: x.detach() for name, x in make(dtype, device, (70, 70), heads=(4, 2), width=width).items()}
    call = prepare(*tensors.values(), key_padding_mask=padding(2, 70, device), causal=True, scale=0.2)
    result = KERNELS(call).forward(call)
    dout = normal(2, 4, 70, width, dtype=dtype, device=device, seed=9).detach()
    saved = (call, result, (dout, None), (True, True, True, False))
    wanted = KERNELS(call).backward(*saved)[:3]
    buffer, views = gradient_views(case, tensors, device)
    given = KERNELS(call).backward(*saved, tuple(views))[:3]
    for want, got, view in zip(wanted, given, views, strict=True):
        assert got is view
        assert torch.equal(want, view)
        view.fill_(float("nan"))
    assert buffer.isnan().all(), "written outside of the gradients"
