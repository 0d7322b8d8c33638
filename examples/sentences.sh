# Sourced by the examples of BERT and T5: prepares a text as sentences of WordPiece tokens, once.
#
# Reads CHECKPOINTS, WORDS (size of a vocabulary that is trained here), SPLIT, VOCAB_FILE and DATA: a .jsonl file, a
# prepared prefix, SAMPLE (the pages of docs/) or MOCK (made-up data). Sets SOURCE, flags of the data, and VOCAB_FILE.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ "${LAUNCHER:-}" = srun ] && { [ "$DATA" = SAMPLE ] || [[ "$DATA" == *.jsonl ]]; }; then
    echo "$DATA: each rank would prepare it; run this script once on one node before, and give the prefix" >&2
    exit 2
fi
if [ "$DATA" = MOCK ] && [ -z "${VOCAB_FILE:-}" ]; then
    VOCAB_FILE=$CHECKPOINTS/made_up_vocab_$WORDS.txt
    mkdir -p "$CHECKPOINTS"
    { printf '%s\n' '[PAD]' '[UNK]' '[CLS]' '[SEP]' '[MASK]' && seq -f 'word%g' $((WORDS - 5)); } >"$VOCAB_FILE.$$"
    mv "$VOCAB_FILE.$$" "$VOCAB_FILE"
fi
if [ "$DATA" = SAMPLE ] || [[ "$DATA" == *.jsonl ]]; then
    if ! command -v python >/dev/null; then
        echo "python: not found; activate the environment of make quickstart first: source .venv/bin/activate" >&2
        exit 2
    fi
    PREPARED=$CHECKPOINTS/data
    mkdir -p "$PREPARED"
    if [ "$DATA" = SAMPLE ]; then
        DATA=$PREPARED/pages.jsonl
        python "$ROOT/examples/bert/pages.py" "$ROOT/docs" "$DATA"
    fi
    if [ -z "${VOCAB_FILE:-}" ]; then
        VOCAB_FILE=$PREPARED/vocabulary/vocab.txt
        [ -f "$VOCAB_FILE" ] || python "$ROOT/tools/train_tokenizer.py" --input "$DATA" --vocab-size $WORDS \
            --tokenizer-type BertWordPieceLowerCase --output-dir "$PREPARED/vocabulary"
    fi
    [ -f "$PREPARED/text_text_sentence.idx" ] || python "$ROOT/tools/preprocess_data.py" --input "$DATA" \
        --output-prefix "$PREPARED/text" --split-sentences --workers 2 \
        --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE"
    DATA=$PREPARED/text_text_sentence
fi
if [ "$DATA" = MOCK ]; then SOURCE=(--mock-data); else SOURCE=(--data-path "$DATA" --split $SPLIT); fi
