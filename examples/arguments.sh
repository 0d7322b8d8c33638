# Sourced at the start of the examples: reads CHECKPOINTS, TOKENIZER and DATA, the words before the first flag. What is
# missing has a default: a folder under runs/, and MOCK, which is no file. The flags stay in "$@".
FOLDER=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
ARGUMENTS=()
while [ $# -gt 0 ] && [[ $1 != -* ]]; do
    ARGUMENTS+=("$1")
    shift
done
CHECKPOINTS=${ARGUMENTS[0]:-runs/$(basename "$FOLDER")} TOKENIZER=${ARGUMENTS[1]:-MOCK} DATA=${ARGUMENTS[2]:-MOCK}
