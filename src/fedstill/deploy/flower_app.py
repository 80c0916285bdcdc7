"""The files that Flower is given: an app, commands, and the filter before a SuperLink.

They are written for a deployment by `fedstill deploy flower`, and for a SuperNode by `fedstill site
start --flower`. Names in braces are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping

PACKAGE = "fedstill_flower"
LINK = "consortium"  # how the SuperLink is called in Flower's own settings

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstill-flower"
version = "1.0.0"
description = "Carries a deployment's bytes to its sites"
license = {{file = "LICENSE"}}
dependencies = ["flwr>=1.41.0,<1.42"]

[tool.hatch.build.targets.wheel]
packages = ["fedstill_flower"]

[tool.flwr.app]
publisher = "fedstill"
fab-format-version = 1
flwr-version-target = "1.41.0"
fab-include = ["LICENSE", "fedstill_flower/*.py"]

[tool.flwr.app.components]
serverapp = "fedstill_flower.server:app"
clientapp = "fedstill_flower.client:app"

[tool.flwr.app.config]
deployment = {deployment}
"""

SERVER = '''\
"""The coordinator of a deployment, inside a ServerApp."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    from fedstill.deploy import flower

    flower.coordinate(grid, Path(str(context.run_config["deployment"])), print)
'''

CLIENT = '''\
"""Carries bytes to the site behind a door of this machine, and its answer back."""

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstill_flower import door

app = ClientApp()


@app.query("fedstill")
def carry(message: Message, context: Context) -> Message:
    question = message.content.config_records["fedstill"]["data"]
    secret = door.read_secret(str(context.node_config["secret"]))
    answer = door.ask(str(context.node_config["door"]), secret, question)
    return Message(RecordDict({"fedstill": ConfigRecord({"data": answer})}), reply_to=message)
'''

LICENSE = "Part of fedstill; see its licence, Apache-2.0.\n"

HOME = """\
[superlink]
default = "consortium"

[superlink.consortium]
address = "127.0.0.1:{inner}"
root-certificates = {authority}
"""

SETTINGS = """\
here=$(cd "$(dirname "$0")" && pwd)
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
"""

SUPERLINK = f"""\
#!/bin/sh
# The SuperLink. It listens on this machine alone: whoever reaches it can run code at all sites.
{SETTINGS}export FLWR_HOME="$here/home"
exec flower-superlink --host 127.0.0.1 --port {{inner}} \\
    --ssl-ca-certfile "$here/ca.crt" --ssl-certfile "$here/link.pem" \\
    --ssl-keyfile "$here/link.key" \\
    --enable-supernode-auth --disable-runtime-dependency-installation "$@"
"""

REGISTER = f"""\
#!/bin/sh
# Tells a SuperLink that was just started the keys of all sites; no other node is let in.
{SETTINGS}export FLWR_HOME="$here/home"
for site in {{sites}}; do
    flwr supernode register "$here/keys/$site.pub" consortium --name "$site" || wrong=1
done
exit "${{{{wrong:-0}}}}"
"""

RUN = f"""\
#!/bin/sh
# Plays the deployment, from its beginning or from its last checkpoint.
{SETTINGS}export FLWR_HOME="$here/home"
exec flwr run "$here/app" consortium "$@"
"""

SUPERNODE = f"""\
#!/bin/sh
# The SuperNode of {{name}}. Run it as a user who cannot read this site's data.
{SETTINGS}exec flower-supernode --superlink {{address}} --root-certificates "$here/ca.crt" \\
    --auth-supernode-private-key "$here/node.key" \\
    --node-config "door=\\"$here/door\\" secret=\\"$here/door.key\\"" "$@"
"""

# What a SuperNode calls, and nothing else: control and runtime lie on the same port.
FLEET = (
    "register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat",
    "pull-messages", "push-messages", "get-run", "get-fab", "push-object", "pull-object",
    "confirm-message-received",
)  # fmt: skip

FILTER = """\
# nginx before a SuperLink: SuperNodes reach what they call, and nobody reaches anything else.
# The SuperLink itself listens on 127.0.0.1:{inner} alone.
worker_processes auto;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log warn;
events {{}}
http {{
    access_log off;
    server_tokens off;
    client_max_body_size {most};
    client_body_temp_path {folder}/nginx-body;
    proxy_temp_path {folder}/nginx-proxy;
    fastcgi_temp_path {folder}/nginx-other;
    uwsgi_temp_path {folder}/nginx-other;
    scgi_temp_path {folder}/nginx-other;
    proxy_read_timeout 3600s;
    proxy_send_timeout 3600s;
    server {{
        listen {outer} ssl;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.2 TLSv1.3;
        location ~ ^/v1/fleet/(?:{fleet})$ {{
            limit_except POST {{ deny all; }}
            proxy_pass https://127.0.0.1:{inner}$uri;
            proxy_http_version 1.1;
            proxy_ssl_verify on;
            proxy_ssl_trusted_certificate {folder}/ca.crt;
            proxy_ssl_name link;
            proxy_set_header Host $host;
            proxy_request_buffering off;
            proxy_buffering off;
        }}
        location / {{ return 403; }}
    }}
}}
"""


def package(door: str) -> Mapping[str, str]:
    """The Python files of the app; `door` is the text of the file that knows how to ask there."""
    return {
        "__init__.py": '"""The app of a fedstill deployment."""\n',
        "server.py": SERVER,
        "client.py": CLIENT,
        "door.py": door,
    }
