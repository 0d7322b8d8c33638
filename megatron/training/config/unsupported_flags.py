"""Flags of Megatron-LM without a field here: accepted where they cannot matter, or refused.

Each has a reason, which is printed when the flag is given.
"""

from fnmatch import fnmatchcase

_GENERATION = "it concerns generation, not training; tools/generate.py and tools/serve.py have flags of their own"
_ALL_TO_ALL = "tokens travel by the all-to-all of torch.distributed, without kernels of DeepEP or HybridEP"
_KERNELS = "the backend of a layer chooses its kernels; the result is the same"

_ACCEPTED = {
    _GENERATION: """
        decode-only-cuda-graphs disable-chunked-prefill enable-chunked-prefill
        inference-batch-times-seqlen-threshold inference-coordinator-port inference-cuda-graph-all-prefills
        inference-cuda-graph-max-tokens inference-cuda-graph-scope inference-disable-ep-consensus
        inference-disable-triton-nvls-kernels inference-dynamic-batching inference-dynamic-batching-async-sched-mode
        inference-dynamic-batching-block-size inference-dynamic-batching-buffer-size-gb
        inference-dynamic-batching-cuda-graph-max-tokens inference-dynamic-batching-cuda-graph-mixed-prefill-count
        inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
        inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
        inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
        inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-caching-coordinator-policy
        inference-dynamic-batching-prefix-caching-eviction-policy inference-dynamic-batching-prefix-caching-mamba-gb
        inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
        inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-unified-memory-level inference-grouped-gemm-backend inference-logging-step-interval
        inference-max-batch-size inference-max-requests inference-max-seq-length
        inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type inference-shards
        inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging
        mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype max-tokens-to-oom
        moe-pad-experts-for-cuda-graph-inference nccl-all-reduce-for-prefill no-inference-disable-ep-consensus
        no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
        no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging
        use-legacy-static-engine use-same-sampling-seed-across-dp-ranks""",
    _KERNELS: """
        flash-attention-version fused-residual-rmsnorm mla-down-proj-fusion moe-permute-fusion-into-hybridep
        use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert use-transformer-engine-op-fuser""",
    _ALL_TO_ALL: """
        moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute
        moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-static-shape
        moe-ncclep-zero-copy""",
    "grouped experts lie in memory in one way, which checkpoints do not depend on": """
        moe-single-grouped-bias moe-single-grouped-weight moe-use-grouped-tensor""",
    "the priority and order of communication follow from what runs": """
        create-all-gather-group disable-align-grad-reduce high-priority-a2a-comm-stream no-align-grad-reduce
        overlap-dispatch-backward-with-experts-wgrad""",
    "the weights of each layer are gathered into memory of its own": """
        fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-enable-fine-grained-param-gather
        megatron-fsdp-max-pool-double-buffer megatron-fsdp-version""",
    "--main-grads-dtype is for all parameters; fp32 is the default": """
        ddp-param-name-patterns-for-fp32-local-accumulation""",
    "layers need no other form to be exported: tools/checkpoint/convert.py export writes any checkpoint as a Hugging "
    "Face folder, which TensorRT-LLM and ModelOpt read": """
        export-force-local-attention export-te-mcore-model modelopt-enabled""",
    "checkpoints are written and read in one way, whose result does not depend on such settings": """
        async-ckpt-cpu-priority async-ckpt-io-priority ckpt-drop-redundant-extra-state
        ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
        ckpt-pg-tensors-cache-path dist-ckpt-save-pre-mcore-014 dist-ckpt-workers""",
    "a load converts weights one by one, so it never needs all of them in another type at once": """
        disable-stream-ckpt-dequant no-stream-ckpt-dequant""",
    "a checkpoint that does not fit is always refused": """
        disable-ckpt-load-validate-sharding-integrity disable-strict-fsdp-dtensor-load
        no-ckpt-load-validate-sharding-integrity no-strict-fsdp-dtensor-load""",
    "the tokenizer is the one that the flags name; checkpoints contain no copy of it": """
        disable-save-tokenizer-assets disable-use-tokenizer-model-from-checkpoint-args no-save-tokenizer-assets
        no-use-tokenizer-model-from-checkpoint-args""",
    "there is no such service; metrics go to metrics.jsonl and to TensorBoard": """
        app-tag-run-name app-tag-run-version no-one-logger one-logger-async one-logger-project one-logger-run-name""",
    "paths are those of the file system": "disable-msc",
    "torch's flight recorder is set by environment variables, such as TORCH_NCCL_TRACE_BUFFER_SIZE": """
        disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
        disable-flight-recorder-include-only-active flight-recorder-dump-path flight-recorder-include-stack-trace
        flight-recorder-trace-buffer-size no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
        no-flight-recorder-include-only-active""",
    "has no effect without --inprocess-restart": """
        inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache
        inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
        inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval
        inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-soft-timeout
        inprocess-termination-grace-time""",
    "has no effect without --enable-ft-package": "calc-ft-timeouts ft-num-warmup-iters",
    "has no effect without --adlr-autoresume": "adlr-autoresume-interval",
    "pretrain always saves and exits after --exit-signal; a script with its own loop asks get_signal_handler()": """
        exit-signal-handler-for-dataloader exit-signal-handler-for-training""",
    "each log line waits for the device, so the host is never further ahead than --log-interval": "train-sync-interval",
    "rejected results are printed, not written to a file": "result-rejected-tracker-filename",
    "index files are mapped into memory, so opening them takes no list and no delay": """
        per-dataset-sequences-path""",
    "a rotation of all queries and keys of the indexer changes no score; it prepares them for 8-bit numbers": """
        disable-dsa-indexer-rotate-activation no-dsa-indexer-rotate-activation""",
    "norms are computed in float32 at least": "dsa-indexer-k-norm-fp32",
    "sparse attention is computed by the same kernels as attention with a mask": "dsa-kernel-backend",
    "has no effect: rounding is the default of --rope-scaling-type yarn": "yarn-correction-range-round-to-int",
    "Muon's state lies in the flat shards of all parameters, in one layout": "no-use-layer-wise-param-layout",
    "main weights are always read together with the weights": "load-main-params-from-ckpt",
    "has no effect without --enable-mhc-connections": """
        mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations""",
    "has no effect without --batch-invariant-mode": "batch-invariant-backend",
    "has no effect without --fp8-recipe mxfp8": "fp8-output-proj",
    "has no effect without --moe-router-load-balancing-type quantile_balancing": "moe-router-quantile-balancing-ema",
    "tokens are sent in the model's type": "moe-combine-bwd-dtype moe-dispatch-fwd-dtype",
}
"""Reasons why flags change nothing here, and the flags."""

_VISION = "training of vision models is out of scope"
_RL = "reinforcement learning is out of scope"

_REFUSED = {
    _VISION: """
        classes-fraction data-per-class-fraction dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size
        dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp dino-warmup-teacher-temp
        dino-warmup-teacher-temp-epochs head-lr-mult img-h img-w iter-per-epoch mask-factor mask-type num-channels
        num-classes patch-dim sample-rate swin-backbone-type vision-backbone-type vision-pretraining
        vision-pretraining-type""",
    _RL: """
        grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight grpo-filter-groups-with-same-reward
        grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step langrl-env-config langrl-external-server
        langrl-inference-server-conversation-template langrl-inference-server-type no-langrl-external-server
        no-rl-inference-logprobs-is-correction no-rl-offload-inference-model-weights-when-idle
        no-rl-offload-kv-cache-during-training no-rl-partial-rollouts no-rl-persist-cuda-graphs
        no-rl-remove-kv-cache-during-training no-rl-reset-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs
        no-rl-use-sequence-packing no-rl-verify-model-weights-swap perform-rl-step refit-method
        rl-consumption-granularity rl-default-temperature rl-default-top-k rl-default-top-p rl-durable-rollout-bank
        rl-generation-lag rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
        rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
        rl-inference-model-unified-memory-level rl-inference-parsers rl-inference-pipeline-model-parallel-size
        rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode rl-max-inflight-requests
        rl-offload-inference-model-weights-when-idle rl-offload-kv-cache-during-training
        rl-offload-optimizer-during-inference rl-parallel-generation-tasks rl-partial-rollouts rl-persist-cuda-graphs
        rl-profile rl-profile-dir rl-prompts-per-eval rl-remove-kv-cache-during-training rl-reset-cuda-graphs
        rl-rollout-bank-dir rl-rollout-bank-max-bytes rl-sequence-packing-algo
        rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token rl-submission-granularity rl-training-cuda-graphs
        rl-use-sequence-packing rl-verify-model-weights-swap""",
    "texts are written token by token, without speculative decoding; tools/serve.py writes many texts at once": """
        num-speculative-tokens""",
    "there is no ONNX export; tools/checkpoint/convert.py export writes a Hugging Face folder, which other programs "
    "turn into ONNX": "onnx-safe",
    "there are no embedding models; tools/checkpoint/convert.py export writes a BERT as a Hugging Face folder, with "
    "which sentence-transformers computes embeddings": "bert-embedder-type output-bert-embeddings",
    "training of retrieval models (ICT, REALM) is out of scope": """
        bert-load biencoder-projection-dim biencoder-shared-query-context-model block-data-path embedding-path
        evidence-data-path ict-head-size ict-load indexer-batch-size indexer-log-interval query-in-block-prob
        retriever-report-topk-accuracies retriever-score-scaling titles-data-path use-one-sent-docs""",
    "training of models that retrieve text (RETRO) is out of scope": """
        retro-add-retriever retro-attention-gate retro-cyclic-train-iters retro-encoder-attention-dropout
        retro-encoder-hidden-dropout retro-encoder-layers retro-num-neighbors retro-num-retrieved-chunks
        retro-no-verify-neighbor-count retro-project-dir retro-verify-neighbor-count retro-workdir""",
    "logits are not kept in files; examples/frozen_reference/train_distilled.py --teacher DIR distils those of a "
    "frozen model's checkpoint": """
        export-kd-cfg export-kd-teacher-load logits-load-decode-threads logits-load-dir logits-load-ignore-errors
        logits-load-kd-loss-alpha logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir
        logits-save-dtype logits-save-top-k logits-save-top-p logits-save-top-p-min-k""",
    "it needs a package of NVIDIA; torchrun --max-restarts restarts failed processes, which resume from --load": """
        enable-ft-package inprocess-restart""",
    "it needs a service of one cluster; SIGTERM makes all ranks save after the same step and exit": "adlr-autoresume",
    "it needs a package of NVIDIA; --profile and tools/show_timeline.py show where a step's time goes": """
        run-workload-inspector-server""",
    "give URLs of object stores (s3://bucket/prefix) as --data-path; fsspec reads them": "enable-msc",
    "NCCL uses SHARP where the network has it if the environment variable NCCL_COLLNET_ENABLE is 1": """
        sharp-enabled-group use-sharp""",
    "--dry-run shows what each rank of any number would hold, in one process": "fake-process-group",
    "a script with a loop of its own calls initialize_megatron after torch.distributed.init_process_group": """
        lazy-mpu-init""",
    "give the sizes; a checkpoint loads under every layout": "use-mp-args-from-checkpoint-args",
    "checkpoints have one format, and every layout loads them; tools/checkpoint/convert.py exports them": """
        ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format""",
    "give --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads, which keeps gathered weights": """
        torch-fsdp2-no-reshard-after-forward""",
    "a token's experts would depend on which experts share a rank; --moe-expert-capacity-factor bounds each expert": """
        moe-expert-rank-capacity-factor""",
    "--moe-router-force-load-balancing spreads tokens evenly to measure speed": "moe-router-force-biased",
    "the gate and the linear part of an MLP are stored one after the other, as in checkpoints": """
        moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size""",
    "it belongs to tools/preprocess_data.py": "append-eod chunk-size input output-prefix workers",
    "give --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples": "warmup",
    "nothing would be trained; --skip-train evaluates, and --lr 0 --min-lr 0 computes steps that change no weight": """
        freeze-all-layers""",
    "traces are not sent to a service; --profile writes them, and metrics.jsonl has the metrics of each step": """
        otel-enabled otel-service-name otel-span-groups""",
    "without --num-distributed-optimizer-instances everything is sharded over all data parallel ranks": """
        enable-full-sharding-in-hsdp""",
    "give --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params, which shards weights over data "
    "parallel ranks": """
        expert-tensor-parallel-num-weight-shards gtp-expert-remat-nccl-ub gtp-remat-nccl-ub gtp-remat-opt-in-modules
        gtp-remat-reduce-scatter-with-fp32-accumulation tensor-parallel-num-weight-shards""",
    "give --data-stages FILE, in which the blend changes at given samples": "phase-transition-iterations",
    "its entries name modules of Transformer Engine; --first-last-layers-bf16 leaves the outer layers out of fp8": """
        te-precision-config-file""",
    "tensors are offloaded whole; give --fine-grained-activation-offloading --offload-modules expert_fc1 moe_act": """
        moe-paged-stash moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda
        moe-paged-stash-page-size""",
    "there are no layers of gated delta products; --experimental-attention-variant gated_delta_net has one update a "
    "token": "gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder",
    "a layer has one residual stream; --residual-multiplier and --norm-placement change how layers add to it": """
        enable-mhc-connections""",
    "each depth reads the states of the depth before, for all tokens; without this flag all depths are trained so": """
        mtp-hsm""",
    "a CUDA graph holds a whole micro-batch, whose activations stay on the device; offload without CUDA graphs": """
        delay-offload-until-cuda-graph""",
}
"""Reasons why flags are refused, with what to give instead where there is something, and the flags."""


def _reasons(groups: dict[str, str]) -> dict[str, str]:
    return {f"--{name}": reason for reason, names in groups.items() for name in names.split()}


ACCEPTED_FLAGS = _reasons(_ACCEPTED)
"""Flags that are accepted with any words and change nothing, and why."""

REFUSED_FLAGS = _reasons(_REFUSED)
"""Flags that stay refused, and why."""

_FIELDS_REFUSED = {
    "fp4-quantizer-factory": "quantizers are classes of Transformer Engine; --fp4-recipe nvfp4 works",
    "fp8-quantizer-factory": "quantizers are classes of Transformer Engine; choose another --fp8-recipe",
    "dsa-indexer-topk-freq": "every layer of sparse attention has its own indexer and selects its own keys; 1 works",
    "dsa-indexer-skip-topk-offset": "it goes with a --dsa-indexer-topk-freq above 1, which is refused; 0 works",
    "mrope-section": "vision models are out of scope; for text, --position-embedding-type rope computes the same",
    "use-legacy-models": "there are no models but those of megatron.core, which a run without this flag has",
    "*kitchen*": "it needs an unpublished package of NVIDIA; --attention-backend chooses another kernel",
    "batch-invariant-mode": "kernels are chosen for speed and may round differently in another batch; "
    "--deterministic-mode makes a run repeatable, --layout-invariant makes it independent of the layout",
}
"""Patterns of flags with a field that stay refused, with what to give instead."""


def refusal_of(spelling: str) -> str | None:
    """Returns why a flag with a field stays refused; None for another flag."""
    name = spelling.removeprefix("--")
    return next((reason for pattern, reason in _FIELDS_REFUSED.items() if fnmatchcase(name, pattern)), None)
