"""The `paceline` command. Each command imports what it needs, so that `paceline --help` is quick."""

from __future__ import annotations

import logging

import typer

from cluster.cli import (
    access,
    audit,
    bench,
    chat,
    generate,
    k8s,
    models,
    policy,
    report,
    rollout,
    serve,
    speculation,
    status,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Serve large language models with disaggregated speculative decoding."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("cluster").setLevel(logging.INFO)


app.command()(serve.serve)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(status.status)
app.command()(report.report)
app.command()(audit.audit)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.bench)
app.add_typer(models.models_app, name="models")
app.add_typer(k8s.k8s_app, name="k8s")
app.add_typer(policy.policy_app, name="policy")
app.add_typer(speculation.speculation_app, name="speculation")
app.add_typer(rollout.rollout_app, name="rollout")
app.add_typer(access.access_app, name="access")
app.add_typer(access.keys_app, name="keys")
app.command()(access.quota)
