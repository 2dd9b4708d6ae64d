"""What people reported in public, and the tests of each kind of fault, or why there is none.

docs/field-reports.md is made of it by test_reports.py. A test is named by its file and function, as
pytest does; `[...]` behind it names one case. Those of generated/tests and tests/gpu need a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

SGLANG = "sgl-project/sglang"
FLASHINFER = "flashinfer-ai/flashinfer"
VLLM = "vllm-project/vllm"

PLANNING = "tests/field/test_planning.py"
SIGNATURES = "tests/field/test_signatures.py"
HOOKS = "tests/executed/test_hooks.py"
PATCHED = "tests/executed/test_patched.py"
RENDER = "tests/test_render.py"
READ = "tests/flashinfer/test_read.py"
SPLICE = "tests/test_splice.py"
DECODE_GPU = "generated/tests/test_decode.py"
VERIFY_GPU = "generated/tests/test_verify.py"
EXTEND_GPU = "generated/tests/test_draft_extend.py"
BACKEND_GPU = "tests/gpu/backend/cases.py"


@dataclass(frozen=True)
class Report:
    """One kind of fault.

    `threads` are `owner/repository#number`; `what` the symptom, in a clause; `tests` those of its
    kind; `reason` why it does not concern mlagen, or what of it does not.
    """

    area: str
    threads: tuple[str, ...]
    what: str
    tests: tuple[str, ...] = ()
    reason: str = ""


def _all(repository: str, *numbers: int) -> tuple[str, ...]:
    return tuple(f"{repository}#{number}" for number in numbers)


_DRIFT = "Arguments and signatures that changed"
_STALE = "A plan that is stale at replay"
_RACES = "Buffers that are overwritten while a copy is queued"
_WAITS = "Waits for the GPU"
_SHAPES = "Shapes, padding, heads, sizes"
_TYPES = "Types, back ends, several GPUs"

REPORTS = (
    Report(
        _DRIFT,
        _all(FLASHINFER, 1813),
        "the private planner takes one argument more",
        (
            f"{SIGNATURES}::test_one_argument_more_fails_before_anything_is_rendered",
            f"{READ}::test_changed_call",
            "tests/judge/test_releases.py::test_an_argument_more_in_flashinfer_is_told",
            "tests/test_cli_errors.py::test_refusal",
        ),
    ),
    Report(
        _DRIFT,
        _all(FLASHINFER, 1720),
        "a torch op says at run time that argument `_15` is missing",
        (
            f"{SIGNATURES}::test_one_argument_more_fails_before_anything_is_rendered",
            f"{READ}::test_torch_op_era",
            f"{READ}::test_stream_is_no_argument_of_the_torch_op",
        ),
    ),
    Report(
        _DRIFT,
        _all(SGLANG, 5353),
        "a FlashInfer that SGLang does not pin: another number of arguments",
        (
            f"{SIGNATURES}::test_a_file_that_was_patched_for_another_flashinfer_is_told",
            "tests/judge/test_releases.py::test_an_upgrade_of_flashinfer_alone",
            "tests/test_plugin.py::test_what_it_was_not_made_for_ends_the_process",
        ),
        "A patched file does not compare versions as it is loaded. `mlagen check` does before a "
        "server starts, the package of `mlagen plugin` when it does.",
    ),
    Report(
        _DRIFT,
        _all(VLLM, 29426, 34687),
        "a public plan gets further parameters (`num_colocated_ctas`, `o_data_type`)",
        (f"{PLANNING}::test_a_defaulted_parameter_more_changes_no_argument",),
    ),
    Report(
        _DRIFT,
        _all(SGLANG, 8685),
        "an argument inserted in a helper shifts those behind it: accuracy 0",
        (
            f"{SIGNATURES}::test_no_foreign_function_gets_a_fourth_argument_by_position",
            f"{SIGNATURES}::test_arguments_in_another_order_are_refused",
            f"{RENDER}::test_no_argument_stands_in_for_another",
            f"{RENDER}::test_no_argument_stands_in_for_another_at_the_edit_sites",
            "tests/forks/test_executed.py::test_a_fork_that_goes_right",
        ),
    ),
    Report(
        _DRIFT,
        _all("kvcache-ai/ktransformers", 1278),
        "code written for a private FlashInfer meets the released one",
        (
            f"{SIGNATURES}::test_a_plan_call_with_a_parameter_of_a_fork_is_refused",
            f"{SIGNATURES}::test_emitted_code_makes_no_wrapper",
            f"{SPLICE}::test_forks_that_are_refused[plan is called with a keyword more]",
        ),
    ),
    Report(
        _DRIFT,
        _all(SGLANG, 24281, 25310, 25312, 25535),
        "FlashInfer upgraded, taken back, upgraded again",
        (
            f"{SIGNATURES}::test_there_and_back_again_is_the_same",
            f"{RENDER}::test_a_render_is_the_same_twice",
            "tests/test_releases.py::test_there_and_back_to_another_flashinfer",
        ),
    ),
    Report(
        _STALE,
        _all("alibaba/rtp-llm", 378, 1084),
        "the page table is refreshed at replay, the plan is not",
        (
            f"{PLANNING}::test_lengths_that_grew_since_the_capture",
            f"{PATCHED}::test_verify_replay",
            f"{DECODE_GPU}::test_a_replay_without_a_plan_of_its_own_is_seen",
            f"{VERIFY_GPU}::test_replays_are_right",
        ),
    ),
    Report(
        _STALE,
        _all(SGLANG, 31364),
        "host lengths of an earlier step where the next one has none: NaN",
        (
            f"{PLANNING}::test_absent_lengths_after_present_ones_are_not_the_old_ones",
            f"{PATCHED}::test_without_host_lengths_one_wait_and_the_same_plan",
            f"{DECODE_GPU}::test_host_lengths_that_are_not_in_step_are_not_used",
        ),
    ),
    Report(
        _STALE,
        _all("NVIDIA/TensorRT-LLM", 18443),
        "one of several wrappers is planned, the others replay",
        (
            f"{PLANNING}::test_a_plan_of_one_wrapper_leaves_the_others_alone",
            "generated/tests/test_draft_decode.py::test_the_chain",
            f"{DECODE_GPU}::test_a_replay_without_a_plan_of_its_own_is_seen",
        ),
    ),
    Report(
        _STALE,
        _all(SGLANG, 34384, 34636),
        "a graph captured with one query geometry is replayed with another: illegal access; the "
        "same threads name wrong lengths of draft-extend, and a chain verify that reads EAGLE's "
        "fields",
        (
            f"{PLANNING}::test_a_replay_of_another_geometry_is_refused",
            f"{PLANNING}::test_a_ragged_replay_is_planned_by_flashinfer",
            f"{PLANNING}::test_a_verify_input_without_eagles_fields",
            f"{HOOKS}::test_the_lengths_of_each_variant",
            f"{HOOKS}::test_verify_inputs_that_are_not",
            f"{PATCHED}::test_eager_extend_with_variable_lengths",
            f"{VERIFY_GPU}::test_a_broken_invariant_is_a_named_error",
            f"{VERIFY_GPU}::test_an_input_that_changed_since_the_capture",
        ),
    ),
    Report(
        _STALE,
        _all(SGLANG, 39803),
        "the draft window is added twice for DFLASH",
        (
            f"{PATCHED}::test_dflash_keeps_flashinfers_plan",
            f"{HOOKS}::test_verify_inputs_that_are_not",
            "tests/judge/test_miniatures.py::test_defects",
        ),
    ),
    Report(
        _STALE,
        _all(VLLM, 36611, 36492),
        "FP8 tile-scheduler metadata is stale in a graph",
        reason="Metadata of FlashMLA's kernels. FlashInfer's schedule lies in the int workspace, "
        "and each replay plans it.",
    ),
    Report(
        _STALE,
        _all(SGLANG, 28028),
        "a subclass falls into its parent's path with an index buffer of two dimensions",
        (
            f"{PLANNING}::test_an_index_buffer_of_rank_two_is_found_when_a_graph_is_captured",
            "tests/forks/test_refused.py::test_a_fork_that_is_refused"
            "[a subclass replaces the capture alone]",
        ),
    ),
    Report(
        _RACES,
        (
            *_all("sgl-project/mini-sglang", 58, 67, 89, 102, 103),
            *_all(VLLM, 32348, 32799),
        ),
        "two plans in a row: the second overwrites the pinned buffer of the first",
        (
            f"{PATCHED}::test_the_host_may_run_ahead",
            f"{PATCHED}::test_the_ring_is_what_protects_the_plans",
            f"{DECODE_GPU}::test_the_host_may_run_ahead",
            f"{BACKEND_GPU}::test_the_host_may_run_ahead",
        ),
    ),
    Report(
        _RACES,
        _all("mstar-project/mstar", 236),
        "an accidental wait was what kept a race away",
        (f"{PLANNING}::test_how_far_the_host_may_run_ahead_is_said_and_kept",),
    ),
    Report(
        _RACES,
        _all("NVIDIA/Megatron-LM", 5715),
        "warm-up in a loop reuses a pinned buffer: page numbers out of bounds",
        (
            f"{PLANNING}::test_how_far_the_host_may_run_ahead_is_said_and_kept",
            f"{VERIFY_GPU}::test_the_host_may_run_ahead",
        ),
    ),
    Report(
        _RACES,
        _all(FLASHINFER, 442),
        "the float workspace may be shared, the int workspace belongs to one wrapper",
        (f"{PLANNING}::test_a_plan_of_one_wrapper_leaves_the_others_alone",),
    ),
    Report(
        _RACES,
        _all(SGLANG, 12790, 17033, 37980),
        "planning on a stream of its own",
        (f"{RENDER}::test_each_plan_takes_a_slot_of_the_stream_that_its_copy_is_queued_on",),
        "mlagen plans on the stream that is current; the events between two streams are those of "
        "whoever made the second one.",
    ),
    Report(
        _WAITS,
        (*_all(SGLANG, 23500), *_all(FLASHINFER, 3338)),
        "a copy from the GPU, and a wait for it, in each plan",
        (
            f"{RENDER}::test_nothing_waits_but_where_it_is_meant_to",
            f"{PATCHED}::test_eager_plans_wait_once_only",
            f"{DECODE_GPU}::test_a_plan_does_not_wait",
            f"{VERIFY_GPU}::test_a_plan_does_not_wait",
            f"{EXTEND_GPU}::test_extends_are_right_and_do_not_wait",
            f"{BACKEND_GPU}::test_waits",
        ),
    ),
    Report(
        _SHAPES,
        _all(FLASHINFER, 5170),
        "more than 16384 work items: wrong rows, then an illegal address",
        (
            f"{HOOKS}::test_the_bound_of_work_items",
            f"{VERIFY_GPU}::test_what_a_capture_refuses_stays_flashinfers",
        ),
    ),
    Report(
        _SHAPES,
        _all(SGLANG, 38590),
        "buffers as large as the pool, a batch that was padded beyond it",
        (f"{PLANNING}::test_host_arrays_are_as_long_as_the_padded_batch",),
    ),
    Report(
        _SHAPES,
        _all(SGLANG, 4276, 8774, 25124, 30916, 35876),
        "a slice of a short array is silently short",
        (
            f"{PLANNING}::test_fewer_lengths_than_rows_are_no_shorter_batch",
            f"{HOOKS}::test_fewer_host_lengths_than_requests_are_named",
            "tests/forks/test_executed.py::test_capture_and_replay_with_sliced_lengths",
        ),
        "FlashInfer 0.7.4's `run` refuses queries that padding made more than were planned, "
        "whoever planned them.",
    ),
    Report(
        _SHAPES,
        _all(SGLANG, 5678),
        "an indptr that falls",
        (
            f"{PLANNING}::test_lengths_that_fall_never_reach_the_planner",
            f"{PLANNING}::test_an_extend_whose_queries_fall_is_named",
            f"{HOOKS}::test_a_negative_length_is_named",
            f"{HOOKS}::test_a_sum_that_overflows_is_named",
            f"{EXTEND_GPU}::test_a_broken_invariant_is_a_named_error",
        ),
    ),
    Report(
        _SHAPES,
        (*_all(SGLANG, 1469, 5875), *_all(FLASHINFER, 868, 3251)),
        "padded rows of length 1 in one back end, 0 in another",
        (
            f"{PLANNING}::test_rows_that_are_padded_with_zero",
            f"{DECODE_GPU}::test_replays_are_right",
        ),
        "What a row without any KV gives is the kernel's.",
    ),
    Report(
        _SHAPES,
        _all(SGLANG, 34636),
        "interleaved pages: illegal access",
        (
            f"{DECODE_GPU}::test_replays_are_right",
            f"{EXTEND_GPU}::test_extends_are_right_and_do_not_wait",
        ),
        "The generated tests shuffle all page numbers.",
    ),
    Report(
        _SHAPES,
        _all(FLASHINFER, 1341, 3130, 3136, 3219),
        "zeros for large or scattered page numbers, or inputs that are not contiguous",
        reason="Faults of kernels, which get the same arguments whoever plans.",
    ),
    Report(
        _SHAPES,
        (*_all(SGLANG, 32062), *_all(VLLM, 41651, 42650)),
        "the head count of the model, in layers that have another",
        (
            f"{PLANNING}::test_heads_are_those_of_the_group_that_plans",
            f"{SPLICE}::test_heads_are_read_where_the_plan_call_reads_them",
        ),
    ),
    Report(
        _TYPES,
        (*_all(SGLANG, 35291, 35322), *_all(FLASHINFER, 2144, 3694, 4373)),
        "fp8 caches: cast whole, or no kernel for them outside of SM90",
        (f"{PLANNING}::test_another_kv_type_is_planned_by_flashinfer_first",),
        "The types are those of SGLang's own plan call; whether there is a kernel for them, "
        "FlashInfer's own first plan says.",
    ),
    Report(
        _TYPES,
        (
            *_all(FLASHINFER, 3405, 3669, 5070),
            *_all(SGLANG, 12325, 26557),
            *_all(VLLM, 36322),
        ),
        "which back end `auto` became, and back ends without a private planner",
        (
            f"{PLANNING}::test_the_resolved_back_end_is_asked",
            f"{PLANNING}::test_both_of_flashinfers_own_are_planned",
            f"{DECODE_GPU}::test_a_back_end_without_a_planner_is_planned_by_flashinfer",
            f"{VERIFY_GPU}::test_a_back_end_without_a_planner_stays_flashinfers",
        ),
        "Which one is fastest is SGLang's choice.",
    ),
    Report(
        _TYPES,
        _all(SGLANG, 30807, 31628),
        "ranks whose hosts are late spin in the first all-reduce",
        ("generated/tests/test_dcp.py::test_one_rank_a_gpu",),
        "Ranks are tested for what they compute. The skew between them is a measurement, and of "
        "SGLang's launch as a whole.",
    ),
    Report(
        _TYPES,
        _all(FLASHINFER, 825, 3279),
        "hangs of a graph on an H20, and of expert parallelism on B200",
        reason="Of FlashInfer 0.2.1, which no release supported here requires, and of another part "
        "of it.",
    ),
)
