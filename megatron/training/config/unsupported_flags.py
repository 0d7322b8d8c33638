"""Flags of Megatron-LM that are not supported yet.

With this list, the error for such a flag says "not yet" instead of suggesting a similar flag.
"""

_NAMES = """
activation-offload-fraction adlr-autoresume adlr-autoresume-interval app-tag-run-name app-tag-run-version
async-ckpt-cpu-priority async-ckpt-io-priority batch-invariant-backend bert-embedder-type bert-load
biencoder-projection-dim biencoder-shared-query-context-model block-data-path calc-ft-timeouts
check-for-spiky-loss ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format
ckpt-drop-redundant-extra-state ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
ckpt-pg-tensors-cache-path classes-fraction cpu-offloading-retain-pinned-cpu-buffers create-all-gather-group
cuda-graph-modules data-per-class-fraction dataloader-defer-npy-index-mmap dataloader-fast-cache-load
dataloader-inter-document-masking ddp-param-name-patterns-for-fp32-local-accumulation decode-only-cuda-graphs
delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks dino-bottleneck-size dino-freeze-last-layer
dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp
dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs disable-align-grad-reduce disable-chunked-prefill
disable-ckpt-load-validate-sharding-integrity disable-dsa-indexer-rotate-activation
disable-dsa-indexer-scoring-relu disable-flight-recorder-dump-on-timeout
disable-flight-recorder-extra-dump-on-exec disable-flight-recorder-include-only-active disable-msc
disable-save-tokenizer-assets disable-straggler-on-startup disable-strict-fsdp-dtensor-load
disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-save-pre-mcore-014 dist-ckpt-workers
dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32 dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset
dsa-indexer-topk-freq dsa-kernel-backend dump-param-to-param-group-map embedding-path enable-chunked-prefill
enable-ft-package enable-full-sharding-in-hsdp enable-gpt-oss enable-mhc-connections enable-msc
evidence-data-path exit-signal-handler-for-dataloader exit-signal-handler-for-training
expert-tensor-parallel-num-weight-shards export-force-local-attention export-kd-cfg export-kd-teacher-load
export-moe-apply-probs-on-input export-qk-l2-norm export-te-mcore-model fake-process-group
fault-injector-delay-start-iteration fault-injector-fault-delay fault-injector-fault-probabilities
fault-injector-fault-types fault-injector-mtti-seconds fault-injector-num-ranks fault-injector-offset-seconds
fault-injector-ranks fault-injector-seed fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix
fim-pad-token fim-prefix-token fim-split-sample fim-suffix-token fine-grained-offloading-max-inflight-offloads
flash-attention-version flight-recorder-dump-path flight-recorder-include-stack-trace
flight-recorder-trace-buffer-size fp8-output-proj freeze-all-layers fsdp-db-use-persist-buf-on-alloc-fail
ft-num-warmup-iters fused-residual-rmsnorm gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute
gdp-num-householder gpu-sniff-test-interval grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight
grpo-filter-groups-with-same-reward grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step
gtp-expert-remat-nccl-ub gtp-remat-nccl-ub gtp-remat-opt-in-modules
gtp-remat-reduce-scatter-with-fp32-accumulation head-lr-mult heterogeneous-layers-config-encoded-json
heterogeneous-layers-config-path high-priority-a2a-comm-stream hybrid-attention-ratio hybrid-layer-pattern
hybrid-mlp-ratio hybrid-override-pattern ict-head-size ict-load img-h img-w indexer-batch-size
indexer-log-interval inference-batch-times-seqlen-threshold inference-coordinator-port
inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens inference-cuda-graph-scope
inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-dynamic-batching
inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-cuda-graph-max-tokens
inference-dynamic-batching-cuda-graph-mixed-prefill-count
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
inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache
inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval
inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-restart inprocess-soft-timeout
inprocess-termination-grace-time iter-per-epoch iterations-to-skip langrl-env-config langrl-external-server
langrl-inference-server-conversation-template langrl-inference-server-type lazy-mpu-init lion-beta1 lion-beta2
load-main-params-from-ckpt log-device-memory-used log-energy log-memory-interval log-straggler
logits-load-decode-threads logits-load-dir logits-load-ignore-errors logits-load-kd-loss-alpha
logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype logits-save-top-k
logits-save-top-p logits-save-top-p-min-k mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype
mamba-training-ssm-states-dtype mask-factor mask-type max-tokens-to-oom
megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer megatron-fsdp-version
memory-snapshot-path mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num
mhc-sinkhorn-iterations mla-down-proj-fusion mlp-chunks-for-training modelopt-enabled moe-combine-bwd-dtype
moe-dispatch-fwd-dtype moe-expert-rank-capacity-factor moe-flex-dispatcher-num-sms
moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing
moe-hybridep-pad-uneven-dispatch-inputs moe-mlp-glu-interleave-size moe-ncclep-zero-copy
moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-paged-stash-buffer-size-factor-cpu
moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size moe-permute-fusion-into-hybridep
moe-router-force-biased moe-router-quantile-balancing-ema moe-routing-trace-capture-hidden-states
moe-routing-trace-capture-logits moe-routing-trace-dump-weights moe-routing-trace-max-training-iters
moe-routing-trace-path moe-shared-expert-glu-interleave-size moe-single-grouped-bias moe-single-grouped-weight
moe-upcycling-granularity moe-use-grouped-tensor moe-use-upcycling mtp-detach-heads mtp-hsm
mtp-hybrid-override-pattern mtp-use-repeated-layer muon-coefficient-type muon-nesterov muon-scalar-optimizer
muon-use-syrk mup-attn-scale-power mup-base-head-dim mup-base-hidden-size mup-embedding-mult mup-output-mult
mup-width-mult nccl-all-reduce-for-prefill no-align-grad-reduce no-ckpt-load-validate-sharding-integrity
no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu no-flight-recorder-dump-on-timeout
no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active no-inference-disable-ep-consensus
no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging no-langrl-external-server no-one-logger
no-rl-inference-logprobs-is-correction no-rl-offload-inference-model-weights-when-idle
no-rl-offload-kv-cache-during-training no-rl-partial-rollouts no-rl-persist-cuda-graphs
no-rl-remove-kv-cache-during-training no-rl-reset-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs
no-rl-use-sequence-packing no-rl-verify-model-weights-swap no-save-tokenizer-assets no-strict-fsdp-dtensor-load
no-use-layer-wise-param-layout no-use-tokenizer-model-from-checkpoint-args no-weight-decay-cond-type
no-yarn-correction-range-round-to-int non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
non-persistent-local-ckpt-dir num-channels num-classes num-speculative-tokens nvtx-ranges
object-storage-cache-path one-logger-async one-logger-project one-logger-run-name otel-enabled otel-service-name
otel-span-groups output-bert-embeddings output-logit-dtype overlap-dispatch-backward-with-experts-wgrad
override-ckpt-iteration patch-dim per-dataset-sequences-path perform-rl-step phase-transition-iterations
pytorch-profiler-collect-chakra query-in-block-prob refit-method relative-attention-max-distance
relative-attention-num-buckets replication replication-factor replication-jump result-rejected-tracker-filename
retriever-report-topk-accuracies retriever-score-scaling rl-consumption-granularity rl-default-temperature
rl-default-top-k rl-default-top-p rl-durable-rollout-bank rl-generation-lag
rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
rl-inference-model-unified-memory-level rl-inference-parsers rl-inference-pipeline-model-parallel-size
rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode rl-max-inflight-requests
rl-offload-inference-model-weights-when-idle rl-offload-kv-cache-during-training
rl-offload-optimizer-during-inference rl-parallel-generation-tasks rl-partial-rollouts rl-persist-cuda-graphs
rl-profile rl-profile-dir rl-prompts-per-eval rl-remove-kv-cache-during-training rl-reset-cuda-graphs
rl-rollout-bank-dir rl-rollout-bank-max-bytes rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin
rl-skip-bos-token rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing
rl-verify-model-weights-swap run-workload-inspector-server sample-rate save-activations-interval
save-dgrads-interval save-params-interval save-tokens-per-expert-interval save-wgrads-interval
sft-tokenizer-prompt-format sharp-enabled-group start-eval-at-iter straggler-ctrlr-port
straggler-minmax-count swin-backbone-type te-precision-config-file tensor-parallel-num-weight-shards
titles-data-path torch-fsdp2-no-reshard-after-forward train-sync-interval use-grouped-gemm-for-dense-mlp
use-grouped-gemm-for-shared-expert use-legacy-static-engine use-mp-args-from-checkpoint-args use-mup
use-one-sent-docs use-same-sampling-seed-across-dp-ranks use-sharp use-transformer-engine-op-fuser
validation-set-names vision-backbone-type vision-pretraining vision-pretraining-type warmup yaml-cfg
yarn-beta-fast yarn-beta-slow yarn-correction-range-round-to-int yarn-original-max-position-embeddings
"""

UNSUPPORTED_FLAGS = frozenset("--" + name for name in _NAMES.split())
