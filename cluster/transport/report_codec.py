"""A report of finished requests ↔ protobuf."""

from __future__ import annotations

from cluster.control.dimensions import Dimension
from cluster.control.report import Comparison, Report, ReportRow
from cluster.control.report_query import ReportQuery, parse_query
from protos.paceline.v1 import control_pb2 as pb


def query_to_wire(query: ReportQuery) -> pb.GetReportRequest:
    return pb.GetReportRequest(window=query.window.label, by=[dimension.value for dimension in query.by])


def query_from_wire(request: pb.GetReportRequest) -> ReportQuery:
    """Raises RequestError(INVALID)."""
    return parse_query(request.window, request.by)


def report_to_wire(report: Report) -> pb.GetReportResponse:
    return pb.GetReportResponse(
        window=report.window,
        started_at=report.started_at,
        ended_at=report.ended_at,
        by=[dimension.value for dimension in report.by],
        requests=report.requests,
        rows=map(_row_to_wire, report.rows),
        comparisons=map(_comparison_to_wire, report.comparisons),
        left_out=report.left_out,
    )


def report_from_wire(response: pb.GetReportResponse) -> Report:
    return Report(
        response.window,
        response.started_at,
        response.ended_at,
        tuple(map(Dimension, response.by)),
        response.requests,
        tuple(map(_row_from_wire, response.rows)),
        tuple(map(_comparison_from_wire, response.comparisons)),
        response.left_out,
    )


def _row_to_wire(row: ReportRow) -> pb.ReportRow:
    return pb.ReportRow(
        values=row.values,
        requests=row.requests,
        error_rate=row.error_rate,
        fallback_rate=row.fallback_rate,
        ttft_p50_s=row.ttft_p50_s,
        ttft_p95_s=row.ttft_p95_s,
        tpot_p50_s=row.tpot_p50_s,
        tpot_p95_s=row.tpot_p95_s,
        itl_p95_s=row.itl_p95_s,
        itl_p99_s=row.itl_p99_s,
        acceptance_length=row.acceptance_length,
        accepted_per_position=row.accepted_per_position,
        break_even=row.break_even,
        explanation=row.explanation,
    )


def _row_from_wire(row: pb.ReportRow) -> ReportRow:
    return ReportRow(
        tuple(row.values),
        row.requests,
        row.error_rate,
        row.fallback_rate,
        row.ttft_p50_s if row.HasField("ttft_p50_s") else None,
        row.ttft_p95_s if row.HasField("ttft_p95_s") else None,
        row.tpot_p50_s if row.HasField("tpot_p50_s") else None,
        row.tpot_p95_s if row.HasField("tpot_p95_s") else None,
        row.itl_p95_s if row.HasField("itl_p95_s") else None,
        row.itl_p99_s if row.HasField("itl_p99_s") else None,
        row.acceptance_length if row.HasField("acceptance_length") else None,
        tuple(row.accepted_per_position),
        row.break_even if row.HasField("break_even") else None,
        row.explanation if row.HasField("explanation") else None,
    )


def _comparison_to_wire(item: Comparison) -> pb.ReportComparison:
    return pb.ReportComparison(
        values=item.values,
        variant=item.variant,
        ttft_p50=item.ttft_p50,
        ttft_p95=item.ttft_p95,
        tpot_p50=item.tpot_p50,
        tpot_p95=item.tpot_p95,
        itl_p95=item.itl_p95,
        itl_p99=item.itl_p99,
        acceptance_length=item.acceptance_length,
    )


def _comparison_from_wire(item: pb.ReportComparison) -> Comparison:
    return Comparison(
        tuple(item.values),
        item.variant,
        item.ttft_p50 if item.HasField("ttft_p50") else None,
        item.ttft_p95 if item.HasField("ttft_p95") else None,
        item.tpot_p50 if item.HasField("tpot_p50") else None,
        item.tpot_p95 if item.HasField("tpot_p95") else None,
        item.itl_p95 if item.HasField("itl_p95") else None,
        item.itl_p99 if item.HasField("itl_p99") else None,
        item.acceptance_length if item.HasField("acceptance_length") else None,
    )
