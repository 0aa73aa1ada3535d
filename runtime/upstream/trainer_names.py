"""Private methods and attributes of transformers' and TRL's trainers.

Used by the hooks, the exact state, saving, resuming and rollouts in `runtime/rank/`, and by features. The
contract tests report what a new release has changed. Contains names only.
"""

from __future__ import annotations

SAVE_CHECKPOINT = "_save_checkpoint"
"""Trainer method (model, trial): write one checkpoint. Collective under DeepSpeed and FSDP."""
OUTPUT_DIR = "_get_output_dir"
"""Trainer method (trial): return the parent directory of checkpoint directories."""
PUSH = "_push_from_checkpoint"
"""Trainer method (checkpoint_folder): begin to upload a checkpoint to the hub, in a thread, on rank 0."""
AFTER_STEP = "_maybe_log_save_evaluate"
"""Trainer method, called after each optimizer step and at the end of an epoch: log, evaluate, save."""
INTERNAL_SAVE = "_internal_call"
"""Second argument of `Trainer.save_model`: the trainer saves a checkpoint or an upload by itself."""
RUN_EPOCH = "_run_epoch"
"""Trainer method: train one epoch. Replaced to restore a finished call without training. Since transformers
5.3."""
GENERATE_AND_SCORE = "_generate_and_score_completions"
GENERATE = "_generate"
CALCULATE_REWARDS = "_calculate_rewards"
"""GRPO and RLOO methods; wrapped to mark their phases."""
LOAD_WEIGHTS = "_load_from_checkpoint"
"""Trainer method (checkpoint): load the weights when a call resumes, without DeepSpeed."""
LOAD_RNG = "_load_rng_state"
"""Trainer method (checkpoint): load the state of this rank's random number generators."""
FINALIZE = "_finalize_training"
"""Trainer method (trial, num_train_samples, start_time): compute the average loss and speed of a call."""
PENDING_LOSS = "_tr_loss"
TOTAL_LOSS = "_total_loss_scalar"
LAST_LOGGED_STEP = "_globalstep_last_logged"
FIRST_STEP = "_initial_global_step"  # since transformers 5.19
"""Trainer attributes that are reset when training starts; the next log line and the final average use them.
"""
TRAINER_ATTRIBUTES = (PENDING_LOSS, TOTAL_LOSS, LAST_LOGGED_STEP, FIRST_STEP)
MICRO_STEP = "_step"
BUFFERED_INPUTS = "_buffered_inputs"
"""GRPO and RLOO attributes: the number of forward passes so far, and the micro-batches of the current
rollout."""
METRICS = "_metrics"
COMPLETION_LOGS = "_logs"
TABLES = (METRICS, COMPLETION_LOGS, "_pending_extra_logs", "_pending_metrics")
"""GRPO and RLOO attributes that collect values for the next log line. SFT has the first."""
TRAIN_TOKENS = "_total_train_tokens"
"""SFT, GRPO and RLOO attribute: a running count of tokens, which SFT logs."""
LOSS_METHODS = (
    "compute_loss", "_compute_loss", "training_step", "_prepare_inputs", "get_batch_samples",
    "get_train_dataloader", GENERATE_AND_SCORE,
)  # fmt: skip
"""Methods of which each decides what the loss of an optimizer step is."""
TOOL_CALLS = "_tool_call_loop"
"""GRPO method that calls the tools of a rollout. RLOO has none."""
SYNC_TOOLS = "_sync_tool_dicts"
ASYNC_TOOLS = "_async_tool_dicts"
"""GRPO attributes: the tools of each row by name, made anew for each rollout."""
ENVIRONMENTS = "_environment_pool"
"""GRPO attribute: the environments by name, of which each has at least one instance. Missing without
environments. Since TRL 1.8."""
FACTORIES = "environment_factories"
"""GRPO attribute: what makes an environment, by its name; None without environments. Since TRL 1.8."""
ENVIRONMENT_LIST = "environments"
"""GRPO attribute: the environments before; since then those of the rollout, by row."""
SUMMARY_WRITER = "_SummaryWriter"
"""Attribute of the TensorBoard callback: the class that writes its files, of torch or tensorboardX."""
TRAINER_METHODS = (SAVE_CHECKPOINT, OUTPUT_DIR, AFTER_STEP, LOAD_WEIGHTS, LOAD_RNG)
"""What a trainer must have to be guarded."""
ROLLOUT_METHODS = (GENERATE_AND_SCORE, GENERATE, CALCULATE_REWARDS)
SINGLE_TURN = "_generate_single_turn"
"""GRPO and RLOO method (prompt_ids, ...): generate one turn. GRPO returns completions and log-probabilities,
RLOO only completions; a completion is a list of tokens."""
PARSE_RESPONSE = "parse_response"
"""Function (tokenizer, ids, **keywords) in the module of GRPO's trainer: the message of a completion, with
the tools that it calls."""
ENGINE = "vllm_generation"
"""GRPO and RLOO attribute: the object that speaks with vLLM. Since TRL 0.28."""
WEIGHTS_SLEEP = "_llm_weights_sleeping"
"""Its attribute: vLLM has discarded its weights, and gets them before it generates. Since TRL 1.10; before,
vLLM loads those of the model's files instead."""
