//go:build linux

package report_test

import (
	"bytes"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/show/report"
	"plimsoll/internal/state/service/protocol"
)

// TestStatIsReadable compares the texts of two services with the expected ones: a busy service and an empty one.
func TestStatIsReadable(t *testing.T) {
	resident := func(b ledger.Bytes) *ledger.Bytes { return &b }
	busy := &protocol.Overview{
		Process: 8118, Seconds: 6.2, Restarts: 1, Kernel: "avx2", Job: "tune", Requests: 12_345, Refused: 2, Clients: 2,
		Unanswered: 3, QueuedBytes: 2 * ledger.KiB,
		Sessions: []protocol.SessionStatus{{
			Part: "bf16", Optimizer: "adamw", State: "split", Moments: "fp32", Elements: 1000, Client: 7965, Step: 5,
			SavedStep: 4, MissesGradients: true, Folder: "/dev/shm/plimsoll", FileSystem: "tmpfs",
			StateBytes: 14_000, TrafficBytes: 26_000_000, LastStepSeconds: 0.001, StepsMade: 5,
			StepSeconds: 0.005,
		}},
		Ledger: ledger.Comparison{
			{Part: "bf16", Component: ledger.Parameters, Planned: 14_000, Measured: resident(14_336)},
			{Rank: ledger.WholeNode, Component: ledger.ServiceProcess, Measured: resident(6 * ledger.MiB)},
		},
	}
	states := &protocol.Overview{
		Process: 1, Kernel: "generic", Requests: 1, Unanswered: 1, Job: "tune",
		Sessions: []protocol.SessionStatus{{Part: "states", Holds: "whole", Client: 7, Step: 5, StateBytes: 14_336}},
		Ledger: ledger.Comparison{
			{Part: "states", Component: ledger.HeldStates, Planned: 20_480, Measured: resident(20_480)},
		},
	}
	for _, test := range []struct {
		overview *protocol.Overview
		want     string
	}{
		{&protocol.Overview{Process: 1, Kernel: "generic", Requests: 1, Unanswered: 1}, `NO STATE: no session is open

service            process 1, up 0s, generic kernels
restarts           0
requests           1, of which 0 were refused
queue              1 in progress, including this one; 0 B not read yet
`},
		{&protocol.Overview{Process: 1, Kernel: "generic", Requests: 1, Unanswered: 1, SetAside: []protocol.SetAside{
			{Name: "3", Job: "tune", Rank: 2, Part: "bf16", Bytes: 64 * ledger.KiB, Reason: "it is no journal"},
			{Name: "7", Bytes: 4 * ledger.KiB, Reason: "this release did not write it"},
		}}, `SET ASIDE: no session is open; "plimsoll restore NAME" tries again, and with --discard frees the memory

service            process 1, up 0s, generic kernels
restarts           0
requests           1, of which 0 were refused
queue              1 in progress, including this one; 0 B not read yet
set aside          session 3 (job tune, rank2/bf16), 64.0 KiB: it is no journal
set aside          session 7, 4.00 KiB: this release did not write it
`},
		{states, `HELD: 14.0 KiB of states that trainers update

service            process 1, up 0s, generic kernels
restarts           0
requests           1, of which 0 were refused
queue              1 in progress, including this one; 0 B not read yet
job                tune

┌──────┬────────┬───────────────┬───────┬────────────┬──────┬───────────┬───────┬────────┬────────────┐
│ rank │ part   │ optimizer     │ state │ parameters │ step │ last step │ moved │ client │ checkpoint │
├──────┼────────┼───────────────┼───────┼────────────┼──────┼───────────┼───────┼────────┼────────────┤
│    0 │ states │ the trainer's │ whole │            │    5 │           │       │      7 │       none │
└──────┴────────┴───────────────┴───────┴────────────┴──────┴───────────┴───────┴────────┴────────────┘

┌──────┬─────────────────────────────┬──────────┬──────────┐
│ rank │ component                   │  planned │ resident │
├──────┼─────────────────────────────┼──────────┼──────────┤
│ 0    │ states/states between steps │ 20.0 KiB │ 20.0 KiB │
├──────┼─────────────────────────────┼──────────┼──────────┤
│      │ all                         │ 20.0 KiB │ 20.0 KiB │
└──────┴─────────────────────────────┴──────────┴──────────┘
`},
		{busy, `HELD: 1,000 parameters, 14.000 bytes each planned, 14.336 resident

service            process 8118, up 6s, avx2 kernels
restarts           1
requests           12,345, of which 2 were refused
queue              3 in progress, including this one; 2.00 KiB not read yet
job                tune
waiting            rank0/bf16: step 6 waits for gradients
files              rank0/bf16: in /dev/shm/plimsoll (tmpfs)

┌──────┬──────┬───────────┬─────────────────────┬────────────┬──────┬───────────┬───────────┬────────┬────────────┐
│ rank │ part │ optimizer │ state               │ parameters │ step │ last step │     moved │ client │ checkpoint │
├──────┼──────┼───────────┼─────────────────────┼────────────┼──────┼───────────┼───────────┼────────┼────────────┤
│    0 │ bf16 │ adamw     │ split, fp32 moments │      1,000 │    5 │       1ms │ 26.0 GB/s │   7965 │     step 4 │
└──────┴──────┴───────────┴─────────────────────┴────────────┴──────┴───────────┴───────────┴────────┴────────────┘

┌──────┬───────────────────┬──────────┬──────────┐
│ rank │ component         │  planned │ resident │
├──────┼───────────────────┼──────────┼──────────┤
│ 0    │ bf16/parameters   │ 13.7 KiB │ 14.0 KiB │
│ all  │ optimizer service │          │ 6.00 MiB │
├──────┼───────────────────┼──────────┼──────────┤
│      │ all               │ 13.7 KiB │ 6.01 MiB │
└──────┴───────────────────┴──────────┴──────────┘
`},
	} {
		var out bytes.Buffer
		if err := (report.Stat{Overview: test.overview}).Page().Write(&out, report.Text); err != nil {
			t.Fatal(err)
		}
		if out.String() != test.want {
			t.Errorf("got\n%s\nwant\n%s", out.String(), test.want)
		}
	}
}
