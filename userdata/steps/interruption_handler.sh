#!/usr/bin/env bash
# Boot step: starts the interruption handler, before any work that an interruption could lose.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

systemctl enable --now interruption-handler.service
systemctl is-active interruption-handler.service >/dev/null ||
    fail "interruption-handler.service is not running; see /var/log/training/interruption.log"
echo "the interruption handler is running"
