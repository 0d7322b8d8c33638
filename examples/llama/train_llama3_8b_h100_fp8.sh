#!/bin/bash
# The older name of train_llama3_8b_fp8.sh, which explains the arguments.
exec "$(dirname "${BASH_SOURCE[0]}")/train_llama3_8b_fp8.sh" "$@"
