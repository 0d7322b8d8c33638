# Sourced at the end of the examples: adds the flags of text and processes, and runs pretrain_gpt.py or SCRIPT.
#
# Reads MODEL, LAYOUT, TRAINING (flags), VOCABULARY, TOKENIZER and DATA ("MOCK": none) or in their place TEXT (flags),
# GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, PRETRAINED, and the flags after the script's own words.
# With LAUNCHER=srun, which examples/train.slurm sets, this process is one rank of many; else torchrun starts all.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

[ -n "${PRETRAINED:-}" ] && TRAINING+=(--pretrained-checkpoint "$PRETRAINED")
if [ -z "${TEXT+given}" ]; then
    if [ "$TOKENIZER" = MOCK ]; then
        TEXT=(--tokenizer-type NullTokenizer --vocab-size $((VOCABULARY - 1)))
    elif [[ $TOKENIZER == *.model ]]; then
        TEXT=(--tokenizer-type Llama2Tokenizer --tokenizer-model "$TOKENIZER" --vocab-size $VOCABULARY)
    elif [ -f "$TOKENIZER/merges.txt" ] && [ ! -f "$TOKENIZER/tokenizer.json" ]; then
        TEXT=(--tokenizer-type GPT2BPETokenizer)
        TEXT+=(--vocab-file "$TOKENIZER/vocab.json" --merge-file "$TOKENIZER/merges.txt")
    else
        TEXT=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" --vocab-size $VOCABULARY)
    fi
    if [ "$DATA" = MOCK ]; then TEXT+=(--mock-data); else TEXT+=(--data-path "$DATA" --split 99,1,0); fi
fi

if [[ " $* " == *" --dry-run "* ]]; then # one process says what all would hold
    export WORLD_SIZE=$(($GPUS_PER_NODE * ${NNODES:-1}))
    LAUNCH=(python)
elif [ "${LAUNCHER:-torchrun}" = srun ]; then
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    LAUNCH=(python)
else
    LAUNCH=(
        torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}"
        --master_addr "${MASTER_ADDR:-localhost}" --master_port "${MASTER_PORT:-6000}"
    )
fi
if ! command -v "${LAUNCH[0]}" >/dev/null; then
    echo "${LAUNCH[0]}: not found; activate the environment of make quickstart first: source .venv/bin/activate" >&2
    exit 2
fi
exec "${LAUNCH[@]}" "$ROOT/${SCRIPT:-pretrain_gpt.py}" "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${TEXT[@]}" "$@"
