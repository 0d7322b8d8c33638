# Sourced by the examples of BERT and T5: prepares a text as sentences of WordPiece tokens, once.
#
# Reads CHECKPOINTS, WORDS (size of a vocabulary that is trained here), DATA (a .jsonl file, a prepared prefix, or SAMPLE:
# the pages of docs/) and VOCAB_FILE. Sets DATA to the prefix of the prepared text, and VOCAB_FILE.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ "$DATA" = SAMPLE ] || [[ "$DATA" == *.jsonl ]]; then
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
