#!/usr/bin/env bash
# Prints the download size of a lock's packages on this platform. Usage: .ci/sizes.sh LOCK
set -o errexit -o nounset -o pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Only this kind of lock has sizes. Without a network, none is made, and the download will say so.
.venv/bin/uv pip compile --quiet --no-deps --format pylock.toml --python .venv/bin/python \
    --output-file "$folder/pylock.toml" "$1" >"$folder/said" 2>&1 || true
touch "$folder/pylock.toml"
awk '
    function weigh() {
        if (name ~ /^(torch|torchvision|triton|nvidia-.*|cuda-.*)$/) torch += size; else others += size
        size = 0
    }
    /^\[\[packages/ { weigh(); packages++ }
    /^name = / { name = substr($3, 2, length($3) - 2) }
    /\.whl"/ && match($0, /size = [0-9]+/) {
        bytes = substr($0, RSTART + 7, RLENGTH - 7) + 0
        if (bytes > size) size = bytes
    }
    END {
        weigh()
        if (!packages) { print "Python packages, of unknown size"; exit }
        printf "%d Python packages, %.0f MB to download", packages, (torch + others) / 1e6
        if (torch) printf ", %.0f MB of it torch (TORCH=cpu takes it without CUDA)", torch / 1e6
        print "; what uv has in its cache is not downloaded again"
    }' "$folder/pylock.toml"
