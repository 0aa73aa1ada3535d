#!/bin/sh
# Install the distribution's Prometheus if this is possible without interaction.
set -eu
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends prometheus >/dev/null
    exit 0
fi
echo "tests need promtool and prometheus: install your distribution's prometheus package" >&2
exit 1
