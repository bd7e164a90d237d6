//go:build linux

package report

import (
	"bytes"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// TestJobOfRanks: two of sixteen ranks were measured, so that all takes eight times as long.
func TestJobOfRanks(t *testing.T) {
	format := kernel.Format{Parameter: dtype.BF16, Gradient: dtype.BF16}
	c := bench.Case{Name: "adamw", Parameters: 16_000_000, Held: 2_000_000, WorldSize: 16, Divided: true}
	for rank := range 2 {
		layout, err := shard.NewLayout(format, shard.DefaultChunk, shard.Uniform(format, 1_000_000))
		if err != nil {
			t.Fatal(err)
		}
		c.Shards = append(c.Shards, engine.ShardConfig{Rank: rank, Layout: layout, CPUs: []int{rank}})
	}
	result := bench.Result{Case: c, Repeats: 1,
		Samples: []bench.Sample{{Traffic: 0.001, Update: 0.002, Fraction: 0.5, Norm: 0.001,
			Peer: map[string]float64{"fused": 0.004}}},
		Compared: &bench.Peer{Name: "torch", Version: "2", Variants: []bench.PeerVariant{{Name: "fused"}}}}
	b := NewBenchmark("1", &bench.Suite{Host: &host.Host{}, Rounds: 1}, []bench.Result{result})
	j := b.Cases[0].Job
	if j.Scale != 8 || j.Traffic != 26*16_000_000 || j.Limit.Median != 0.008 || j.Update.Median != 0.016 ||
		j.Step.Median != 0.024 || j.Peer[0].Time.Median != 0.032 || j.Ranks != 2 || j.Parameters != 16_000_000 {
		t.Errorf("%+v", j)
	}
	// The same figure for a parameter as in the part that was measured.
	if measured, all := b.Cases[0].Time.Median, j.Update.Median/float64(j.Parameters); measured != all {
		t.Errorf("%g s for a parameter of the part, %g s for one of all", measured, all)
	}
	var out bytes.Buffer
	if err := b.Page().Write(&out, Markdown); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| 16000000 | 2 | 2 | limit | 397 MiB | 8.0 | 500.0 |  |",
		"| 16000000 | 2 | 2 | update | 397 MiB | 16.0 | 1000.0 | 50 % (50..50) |",
		"| torch fused |  | 32.0 | 2000.0 |  |",
		"measured: 2000000 of 16000000 parameters (2 of 16 ranks), times multiplied by 8",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
}
