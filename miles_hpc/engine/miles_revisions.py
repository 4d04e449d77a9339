"""Which flags each known revision of radixark/miles adds to its parser: a table, and what it answers.

Made by `python -m miles_hpc.miles_driver.sources CHECKOUT`, so a flag that a revision composes at run time stands nowhere;
Megatron's and SGLang's own flags are not Miles'. Standard library only, since the head node reads it too.
"""

from collections.abc import Mapping

_COMMON_NAMES = """
    actor-num-gpus-per-node actor-num-nodes advantage-estimator allgather-cp apply-chat-template
    apply-chat-template-kwargs async-save balance-data buffer-filter-path calculate-per-token-loss
    chat-template-path check-lora-weight-equal check-weight-update-allow-quant-error check-weight-update-equal
    check-weight-update-selector check-weight-update-skip-list ci-check-model-hash ci-disable-kl-checker
    ci-disable-logprobs-checker ci-ft-test-actions ci-inject-rollout-data-min-match-ratio
    ci-inject-rollout-data-path ci-inject-rollout-data-start-rollout-id ci-load-grad-norm ci-metric-checker-key
    ci-metric-checker-threshold ci-save-grad-norm ci-save-model-hash ci-test clip-grad colocate config
    control-server-port critic-load critic-lr critic-lr-warmup-iters critic-num-gpus-per-node critic-num-nodes
    critic-save custom-agent-function-path custom-config-path custom-convert-samples-to-train-data-path
    custom-eval-rollout-log-function-path custom-generate-function-path custom-loss-function-path
    custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path custom-megatron-init-path
    custom-megatron-post-save-hook-path custom-model-provider-path custom-pg-loss-reducer-function-path
    custom-reward-post-process-path custom-rm-path custom-rollout-log-function-path custom-tis-function-path
    custom-update-weight-post-write-path data-pad-size-multiplier data-source-path debug-deterministic-collective
    debug-disable-optimizer debug-exit-after-rollout debug-rollout-only debug-skip-weight-update debug-train-only
    delay-split-train-data-by-dp disable-compute-advantages-and-returns disable-grpo-std-normalization
    disable-rewards-normalization disable-rollout-global-dataset disable-rollout-trim-samples
    disable-wandb-random-suffix distributed-backend distributed-timeout-minutes dsa-attention-backend dump-details
    dumper-dir dumper-enable dumper-fwd-bwd dumper-fwd-only dumper-inference dumper-source-patcher-config-inference
    dumper-source-patcher-config-train dynamic-sampling-filter-path enable-event-analyzer enable-mtp-training
    enable-witness entropy-coef env-report eps-clip eps-clip-c eps-clip-high eval-config eval-function-path
    eval-input-key eval-interval eval-label-key eval-max-context-len eval-max-prompt-len eval-max-response-len
    eval-min-new-tokens eval-prompt-data eval-reward-key eval-temperature eval-tool-key eval-top-k eval-top-p
    exclude-modules experts-shared-outer-loras extra-high-precision-layers-hf extra-high-precision-layers-megatron
    fetch-trajectory-retry-times freeze-indexer ft-components gamma generate-execute-tool-function-path
    generate-max-turns generate-tool-call-parser generate-tool-specs-path get-mismatch-metrics global-batch-size
    group-rm hf-checkpoint host http-proxy indep-dp input-key keep-old-actor kl-coef kl-loss-coef kl-loss-type
    label-key lambd linear-attention-backend load load-debug-rollout-data load-debug-rollout-data-subsample
    log-correct-samples log-multi-turn log-passrate log-probs-chunk-size log-probs-max-tokens-per-gpu
    log-reward-category lora-adapter-path lora-alpha lora-base-cpu-backup lora-dropout lora-rank
    lora-sync-from-tensor lora-type loss-mask-type loss-type low-memory-resume lr mask-offpolicy-in-partial-rollout
    max-seq-len max-tokens-per-gpu max-weight-staleness megatron-to-hf-mode memory-recorder memory-snapshot-dir
    memory-snapshot-num-steps metadata-key micro-batch-size miles-dsa-topk-backend
    miles-router-health-check-failure-threshold miles-router-max-connections miles-router-timeout
    min-batch-collection-ratio mini-ft-controller-enable mini-ft-controller-poll-interval
    mini-ft-controller-resume-delay mlflow-experiment-name mlflow-run-id mlflow-run-name mlflow-tracking-uri
    model-name mtp-loss-scaling-factor mtp-num-layers multimodal-keys n-samples-per-eval-prompt n-samples-per-prompt
    no-offload-rollout no-offload-train no-save-optim no-sglang-lora-use-virtual-experts normalize-advantages
    num-critic-only-steps num-epoch num-gpus-per-node num-rollout num-steps-per-rollout observe-training-entropy
    offload offload-rollout offload-rollout-level offload-train opd-kl-coef opd-log-prob-top-k
    opd-reward-weight-mode opd-teacher-ckpt-step opd-teacher-load opd-top-k-strategy opd-type opsm-delta
    over-sampling-batch-size p2p-transfer-num-workers p2p-transfer-timeout padded-vocab-size partial-rollout
    pause-generation-mode pin-rollout-manager-to-head port prefill-num-servers profile-target prometheus-port
    prometheus-run-name prompt-data qkv-format recompute-logprobs-via-prefill recompute-loss-function ref-ckpt-step
    ref-load ref-update-interval reset-optimizer-states reward-key rm-type rm-url rollout-all-samples-process-path
    rollout-batch-size rollout-buffer-url rollout-data-postprocess-path rollout-external
    rollout-external-engine-addrs rollout-function-path rollout-health-check-first-wait
    rollout-health-check-interval rollout-health-check-timeout rollout-max-context-len rollout-max-prompt-len
    rollout-max-response-len rollout-num-gpus rollout-num-gpus-per-engine rollout-sample-filter-path rollout-seed
    rollout-shuffle rollout-skip-special-tokens rollout-stop rollout-stop-token-ids rollout-task-type
    rollout-temperature rollout-top-k rollout-top-p save save-debug-event-data save-debug-rollout-data
    save-debug-train-data save-hf save-interval save-local-weight-checksum seed session-server-ip
    session-server-port sglang-config sglang-host sglang-port sglang-router-ip sglang-router-policy
    sglang-router-port sglang-router-request-timeout-secs sglang-server-concurrency skip-eval-before-train
    start-rollout-id target-modules tb-experiment-name tb-project-name tis-clip tis-clip-low tito-model
    tokenizer-name tool-key train-backend train-env-vars train-memory-margin-bytes true-on-policy-mode
    update-weight-buffer-size update-weight-delta-checksum update-weight-delta-encoding update-weight-disk-dir
    update-weight-local-checkpoint-dir update-weight-transfer-mode update-weights-interval use-distributed-post
    use-dynamic-batch-size use-dynamic-global-batch-size use-fault-tolerance use-indexer-replay use-kl-loss
    use-miles-router use-mlflow use-opd use-opsm use-prometheus use-rollout-entropy use-rollout-indexer-replay
    use-rollout-logprobs use-rollout-routing-replay use-routing-replay use-session-server use-tensorboard use-tis
    use-unbiased-kl use-wandb value-clip verbose wandb-always-use-train-step wandb-dir wandb-group wandb-host
    wandb-key wandb-mode wandb-project wandb-run-id wandb-team witness-buffer-size
"""
"""Flags of every revision below."""
_COMMON = frozenset(_COMMON_NAMES.split())

_MORE: Mapping[tuple[str, ...], str] = {
    ("31f1ca961",): """
    allow-partial-train-step async-data-buffer-capacity-factor async-max-concurrent-samples
    async-unused-samples-handler balance-by-flops check-rematerialize-param-from-master-weight
    ci-disable-weight-update-checker custom-async-data-buffer-path dashboard-flush-interval
    dashboard-forward-prometheus dashboard-gpu-sample-interval dashboard-sglang-metrics
    dashboard-sglang-scrape-interval dashboard-sglang-scrape-mode eval-hf-dir eval-keep-snapshots eval-max-in-flight
    eval-num-gpus eval-num-gpus-per-engine eval-overflow-policy fully-async lora-train-only mfu-peak-tflops
    mooncake-replica-num mooncake-store-init-kwargs multi-lora-adapter multi-lora-api-port multi-lora-backend-path
    multi-lora-disable-service-mode multi-lora-http-server-path multi-lora-idle-poll-s
    multi-lora-max-adapter-global-batch-size multi-lora-max-coalesce-wait-s multi-lora-max-empty-wait-s
    multi-lora-n-adapters object-store-backend offload-train-disk-chunk-mb offload-train-disk-dir
    offload-train-target opd-teacher-key opd-teacher-urls opd-topk-per-position
    rematerialize-param-from-master-weight rollout-submission-granularity save-debug-trajectory-data
    save-trigger-sentinel session-message-matcher session-sample-picker-path session-sample-postprocessor-path
    skip-actor-forward-only stream-optimizer-state-moment-dtype stream-optimizer-state-to-disk use-miles-dashboard
    """,
    ("57b381de5", "18bce68cb"): """
    allow-partial-train-step async-data-buffer-capacity-factor async-max-concurrent-samples
    async-unused-samples-handler balance-by-flops check-rematerialize-param-from-master-weight
    ci-disable-weight-update-checker colocate-memory-peak-device custom-async-data-buffer-path
    dashboard-flush-interval dashboard-forward-prometheus dashboard-gpu-sample-interval dashboard-sglang-metrics
    dashboard-sglang-scrape-interval dashboard-sglang-scrape-mode debug-lora-train-only disable-fp32-master
    eval-hf-dir eval-keep-snapshots eval-max-in-flight eval-num-gpus eval-num-gpus-per-engine eval-overflow-policy
    fully-async lora-provider-path mooncake-replica-num mooncake-store-init-kwargs multi-lora-adapter
    multi-lora-api-port multi-lora-backend-path multi-lora-disable-service-mode multi-lora-http-server-path
    multi-lora-idle-poll-s multi-lora-max-adapter-global-batch-size multi-lora-max-coalesce-wait-s
    multi-lora-max-empty-wait-s multi-lora-n-adapters object-store-backend offload-train-disk-chunk-mb
    offload-train-disk-dir offload-train-target opd-teacher-key opd-teacher-urls opd-topk-per-position
    reload-rollout-weights-from-disk rematerialize-param-from-master-weight rollout-submission-granularity
    save-debug-trajectory-data save-trigger-sentinel session-sample-picker-path session-sample-postprocessor-path
    stream-optimizer-state-moment-dtype stream-optimizer-state-to-disk use-miles-dashboard
    """,
    ("e13758d9b",): """
    check-rollout-weight-reload-equal disable-weights-backuper drop-checkpoint-page-cache-after-load
    generate-multi-samples reload-rollout-weights-from-disk tito-allowed-append-roles
    """,
}
"""Further flags, by the commits that have them; the first is the one that messages name."""

DESCRIPTIONS: Mapping[str, str] = {
    "31f1ca961": "main of 2026-08-21",
    "57b381de5": "pull request 2488, merged (Qwen3.8)",
    "e13758d9b": "branch agent/kimi-k3-lora of 2026-07-20",
}

_TABLE: Mapping[tuple[str, ...], frozenset[str]] = {
    commits: _COMMON | frozenset(more.split()) for commits, more in _MORE.items()
}
_ALL = frozenset().union(*_TABLE.values())


def revision_flags(revision: str) -> frozenset[str] | None:
    """Return the flags of `revision`, a commit or the beginning of one; None when the table does not know it."""
    for commits, flags in _TABLE.items():
        if any(revision.startswith(known) or known.startswith(revision) for known in commits):
            return flags
    return None


def is_lacking(revision: str, flag: str) -> bool:
    """Say whether `revision` is known not to have `flag`, which another revision has; with or without "no-"."""
    flags = revision_flags(revision)
    return flags is not None and _is_miles(flag) and not _has(flags, flag)


def unknown_flags(flags: frozenset[str], asked: frozenset[str]) -> tuple[str, ...]:
    """Return those of `asked` that are Miles' own in some revision and that a checkout with `flags` does not have."""
    return tuple(sorted(name for name in asked if _is_miles(name) and not _has(flags, name)))


def revisions_with(flag: str) -> tuple[str, ...]:
    """Return the known revisions that have `flag`, each by the commit that messages name."""
    return tuple(commits[0] for commits, flags in _TABLE.items() if _has(flags, flag))


def differing_flags() -> tuple[str, ...]:
    """Return the flags that some known revisions have and others lack."""
    return tuple(sorted(_ALL - _COMMON))


def _is_miles(flag: str) -> bool:
    return _has(_ALL, flag)


def _has(flags: frozenset[str], flag: str) -> bool:
    return flag in flags or flag.removeprefix("no-") in flags
