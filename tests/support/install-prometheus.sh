#!/bin/sh
# Install the distribution's Prometheus and Alertmanager if this is possible without interaction.
set -eu
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends prometheus prometheus-alertmanager >/dev/null
    exit 0
fi
echo "tests need promtool, prometheus and prometheus-alertmanager: install your distribution's packages" >&2
exit 1
