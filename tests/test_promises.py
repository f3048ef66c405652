"""What bad input and faults get, row by row, and the test that proves each row.

A row names a file, a test in it, and where that test goes through a table also the words of its entry there.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TYPES, VALUES = "test_errors.py::test_type_errors", "test_errors.py::test_value_errors"
EVERY, ATTENTION, EXTENSION = "ops/test_every_operation.py", "ops/test_attention.py", "test_extension.py"
FAULTS, CHECKPOINT = "training/test_faults.py::test_faults", "training/test_checkpoint.py"

Row = tuple[str, str] | str

TYPE_ERROR: dict[str, Row] = {
    "not a tensor": (TYPES, "gelu: x must be a tensor; got int"),
    "integer dtype": (TYPES, "float64; got torch.int32"),
    "bool dtype": (TYPES, "got torch.bool"),
    "complex dtype": (TYPES, "got torch.complex64"),
    "q, k, v of different dtypes": (TYPES, "got torch.float32, torch.float16 and torch.float32"),
    "integer mask": (TYPES, "use mask.bool()"),
    "non-numeric scale": (TYPES, "softmax: scale must be a number; got str"),
    "non-numeric eps": (TYPES, "layer_norm: eps must be a number; got str"),
    "non-numeric p": (TYPES, "dropout_p must be a number; got NoneType"),
    "sparse layout": (TYPES, "got layout torch.sparse_coo"),
    "nested layout": (TYPES, "got layout nested"),
    "quantised layout": (TYPES, "got torch.qint8"),
}
VALUE_ERROR: dict[str, Row] = {
    "wrong number of dimensions": (VALUES, "q must have 4 dimensions (B, H, L, D); got (4, 5, 8)"),
    "head dims of q and k differ": (VALUES, "k must have the head dimension of q (8)"),
    "Lk differs between k and v": (VALUES, "got v (2, 2, 3, 8)"),
    "batch sizes differ": (VALUES, "k must have the batch size of q (2)"),
    "heads not divisible": (VALUES, "the heads of k (3) must divide the heads of q (4)"),
    "mask not broadcastable": (VALUES, "mask must broadcast to (3, 6); got (5,)"),
    "bias not broadcastable": (VALUES, "attn_bias must broadcast to (2, 4, 5, 7); got (3, 7)"),
    "p outside [0, 1]": (VALUES, "dropout_p must be in [0, 1]; got 1.5"),
    "p is NaN": (VALUES, "dropout_p must be in [0, 1]; got nan"),
    "scale not finite": (VALUES, "attention: scale must be finite; got inf"),
    "eps <= 0": (VALUES, "eps must be positive; got 0.0"),
    "weight or bias of the wrong shape": (VALUES, "weight must have shape (6,); got (5,)"),
    "weight or bias of the wrong dtype": (VALUES, "weight must have the dtype of x (torch.float32) or torch.float32"),
    "unknown approximation": (VALUES, "got 'sigmoid'"),
    "head dim 0": (VALUES, "the head dimension must be positive"),
    "head dim above the maximum": "test_errors.py::test_a_head_dimension_above_the_maximum_names_who_takes_it",
    "unknown backend": "test_dispatch.py::test_an_unknown_backend_is_named_with_the_known_ones",
    "hidden size not divisible by heads": "test_errors.py::test_six_heads_do_not_divide_a_hidden_size_of_256",
    "sequence longer than the model's positions": (
        "python_ref/test_layers.py::test_sequence_longer_than_the_positions_is_refused"
    ),
    "window not positive": (VALUES, "window must be positive; got 0"),
}
OTHER_ERRORS: dict[str, Row] = {
    "axis out of range": "test_nn.py::test_softmax_over_an_axis_that_is_not_there",
    "token id outside the vocabulary": "ops/test_embedding.py::test_an_unknown_id_is_an_index_error_on_the_cpu",
    "tensors on different devices": "test_errors.py::test_tensors_on_different_devices_are_listed",
    "double backward": "test_autograd.py::test_double_backward_is_an_error_in_every_way_to_ask",
    "vmap": "test_autograd.py::test_vmap_is_refused",
    "forward-mode AD": "test_autograd.py::test_forward_mode_is_refused",
    "a CPU tensor with backend='cuda' and no emulation": f"{EXTENSION}::test_cpu_tensors_without_emulation",
    "extension not built": f"{EXTENSION}::test_not_built",
    "Triton missing": "test_triton.py::test_a_missing_triton_is_a_reason_not_an_error",
    "no kernel image for this GPU": (f"{EXTENSION}::test_a_gpu_that_cannot_run_it", "no kernel image for sm_75"),
    "driver too old": (f"{EXTENSION}::test_a_gpu_that_cannot_run_it", "update the driver"),
    "a dtype that the backend lacks": "test_dispatch.py::test_float64_is_for_torch_only",
    "a mask that the backend lacks": f"{ATTENTION}::test_an_option_that_a_backend_lacks_is_refused",
}
MUST_SUCCEED: dict[str, Row] = {
    "B, H or Lq = 0": (f"{ATTENTION}::test_empty", "(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3)"),
    "Lk = 0": (f"{ATTENTION}::test_empty", "(2, 2, 3, 0)"),
    "no rows": f"{EVERY}::test_empty",
    "a fully masked row": f"{ATTENTION}::test_rows_that_see_nothing",
    "a row masked with finfo.min": f"{ATTENTION}::test_a_bias_of_the_lowest_number_stays_finite",
    "garbage behind the padding mask": f"{ATTENTION}::test_nothing_behind_the_padding_mask_gets_out",
    "NaN in a real token, padded": f"{ATTENTION}::test_nan_in_a_token_reaches_no_other_sequence",
    "NaN in a real token, packed": "ops/test_attention_sequences.py::test_nothing_crosses_a_border",
    "softmax of a row of -inf": "ops/test_softmax.py::test_a_row_of_minus_infinity_is_nan_as_in_pytorch",
    "masked softmax of a hidden row": "ops/test_softmax.py::test_rows_that_see_nothing",
    "lengths 1, 17, 127, 129": (f"{ATTENTION}::test_matches_reference_over_lengths", "(1, 1), (17, 17), (127, 127)"),
    "length 1025": (f"{ATTENTION}::test_matches_reference_over_long_lengths", "(1025, 1025)"),
    "head dims": (
        f"{ATTENTION}::test_matches_reference_over_head_dims",
        "[1, 8, 40, 59, 64, 72, 80, 96, 111, 128, 160, 192, 256]",
    ),
    "transposed, sliced, expanded inputs": (f"{EVERY}::test_any_layout", "[*LAYOUTS, expanded]"),
    "an offset that breaks 16-byte alignment": f"{EVERY}::test_misaligned_in_16_bits",
    "expanded or strided grad_output": f"{EVERY}::test_gradient_of_any_layout",
    "causal with Lq != Lk both ways": (f"{ATTENTION}::test_matches_reference_over_lengths", "(129, 17), (65, 257)"),
    "float16 logits near 6e4": f"{ATTENTION}::test_large_float16_logits_stay_finite",
    "LayerNorm of width 1": ("ops/test_layer_norm.py::test_matches_reference_over_widths", '"width", [1, 3,'),
    "LayerNorm of a constant row": "ops/test_layer_norm.py::test_a_constant_row_gives_the_bias",
    "LayerNorm with mean 1e6": "ops/test_layer_norm.py::test_a_large_mean",
    "denormals": "ops/test_layer_norm.py::test_denormals",
    "only some inputs requiring grad": f"{EVERY}::test_only_one_gradient_is_wanted",
    "retain_graph and a second backward": "test_autograd.py::test_retain_graph_and_a_second_backward",
    "autocast with mixed dtypes": "test_autograd.py::test_autocast_of_mixed_dtypes",
    "meta tensors": "test_autograd.py::test_meta_tensors_give_shapes",
    "deepcopy and pickle of modules": "test_nn.py::test_copies",
    "a state_dict across backends": "test_models.py::test_state_dict_moves_between_operations",
    "a state_dict to torch.nn": "test_nn.py::test_state_dict_loads_in_both_directions",
}
FAULT: dict[str, Row] = {
    "no nvcc at install": f"{EXTENSION}::test_setup_without_nvcc_goes_on_and_says_so_in_one_line",
    "no GPU at install": f"{EXTENSION}::test_setup_with_nvcc_and_no_gpu_builds_nothing_and_leaves_a_note",
    "nvcc fails": f"{EXTENSION}::test_setup_with_a_failing_nvcc_shows_its_last_lines",
    "broken or truncated extension file": f"{EXTENSION}::test_a_broken_file",
    "stale extension file": f"{EXTENSION}::test_a_stale_file",
    "foreign extension file": f"{EXTENSION}::test_a_foreign_file",
    "Triton of an unsupported version": "test_triton.py::test_an_unsupported_version_states_the_range",
    "no GPU": "test_cli.py::test_info_of_a_machine_without_a_gpu_says_so_once",
    "launch error": "ops/test_row_kernels_cuda.py::test_launch_limits_are_those_of_the_device",
    "out of memory in a step": (
        "training/test_trainer.py::test_out_of_memory_leaves_the_optimizer_unstepped_and_the_next_step_works"
    ),
    "two processes building at once": f"{EXTENSION}::test_processes_that_come_together_both_get_the_file",
    "two processes filling a cache at once": "training/test_files.py::test_two_processes_at_once_download_once",
    "killed while a checkpoint is written": f"{CHECKPOINT}::test_a_kill_at_any_moment_leaves_a_whole_checkpoint",
    "disk full while a checkpoint is written": (FAULTS, "disk full while a checkpoint is written"),
    "truncated checkpoint": f"{CHECKPOINT}::test_a_truncated_file_tells_both_sizes",
    "bit-flipped checkpoint": f"{CHECKPOINT}::test_a_flipped_bit_tells_both_hashes",
    "hostile checkpoint": f"{CHECKPOINT}::test_hostile_contents_with_a_correct_hash_are_refused",
    "checkpoint of another model": f"{CHECKPOINT}::test_weights_of_another_model_are_listed",
    "checkpoint of another vocabulary": "training/test_trainer.py::test_resuming_with_another_vocabulary_is_refused",
    "resume": "training/test_trainer.py::test_resuming_is_bit_exact",
    "resume: every random state": "training/test_trainer.py::test_every_random_state_comes_back",
    "data file with the wrong hash": (FAULTS, "data file with the wrong hash"),
    "tokenizer with the wrong hash": "training/test_tokenizers.py::test_a_wrong_vocabulary_file_tells_both_hashes",
    "partial download": "training/test_files.py::test_a_bad_download_leaves_nothing_behind",
    "offline": "training/test_files.py::test_offline_tells_url_path_and_remedy",
    "empty or too short corpus": (
        "training/test_corpus.py::test_an_empty_or_short_corpus_states_its_length_and_what_is_needed"
    ),
    "NaN loss": "training/test_trainer.py::test_a_nan_loss_stops_with_step_rate_and_batch_and_is_never_saved",
    "Ctrl-C / SIGTERM": "training/test_interruption.py::test_a_signal_makes_one_checkpoint_and_sets_the_status",
    "a second Ctrl-C": "training/test_interruption.py::test_a_second_interrupt_ends_at_once",
    "a folder that holds a run already": (FAULTS, "a folder that holds a run already: refused"),
    "a folder that is being written by another": (FAULTS, "a folder that is being written by another process"),
    "two threads make the first call together": f"{EXTENSION}::test_threads_that_come_together_build_and_load_once",
}
TABLES = {
    "TypeError": (TYPE_ERROR, 12),
    "ValueError": (VALUE_ERROR, 20),
    "other errors": (OTHER_ERRORS, 13),
    "must succeed": (MUST_SUCCEED, 29),
    "faults": (FAULT, 32),
}
ROWS = {f"{table}: {row}": promise for table, (rows, _) in TABLES.items() for row, promise in rows.items()}


@functools.cache
def source(file: str) -> tuple[str, frozenset[str]]:
    """The text of a test file, and the tests that it defines."""
    text = (FOLDER / file).read_text()
    return text, frozenset(node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("row", ROWS)
def test_a_test_proves(row: str) -> None:
    promise = ROWS[row]
    test, entry = promise if isinstance(promise, tuple) else (promise, "")
    file, _, name = test.partition("::")
    text, tests = source(file)
    assert name in tests and entry in text, f"{row}: {test} {entry!r} is not there"


@pytest.mark.parametrize("table", TABLES)
def test_no_row_vanishes(table: str) -> None:
    rows, count = TABLES[table]
    assert len(rows) == count
