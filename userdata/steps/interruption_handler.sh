#!/usr/bin/env bash
# Boot step: starts the interruption handler, before anything that an interruption could hurt.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

systemctl enable --now interruption-handler.service
systemctl is-active interruption-handler.service >/dev/null ||
    fail "interruption-handler.service does not run; see /var/log/training/interruption.log"
echo "the interruption handler runs"
