package report

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
)

// TestBriefSnapshot: whatever a snapshot has, its brief page is one screen of 24 lines of 80 columns. It has the
// answer, and says where the rest is. --long has everything.
func TestBriefSnapshot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		long := func(name string) string {
			return strings.Repeat("folder/", rapid.IntRange(0, 40).Draw(t, name)) + name + ".py:1 forward"
		}
		d := &Snapshot{File: long("file"), rows: 10}
		for i := range rapid.IntRange(1, 16).Draw(t, "devices") {
			x := SnapshotDevice{Device: i, Reserved: ledger.GiB, At: SnapshotMoment{Requested: ledger.GiB}}
			for j := range rapid.IntRange(0, 40).Draw(t, "places") {
				x.ByPlace = append(x.ByPlace, SnapshotOwner{ledger.OptimizerStates, long("place"), ledger.MiB, j})
				x.Changes = append(x.Changes, SnapshotDiff{ledger.Activations, long("changed"), 0, ledger.MiB})
			}
			if !rapid.Bool().Draw(t, "compared") {
				x.Changes = nil
			}
			if rapid.Bool().Draw(t, "failed") {
				x.Failed = []SnapshotOOM{{Wanted: ledger.MiB, Place: long("asker"), Why: long("why")}}
			}
			for range rapid.IntRange(0, 1).Draw(t, "replays") {
				x.Replays = []Replayed{{Name: "recorded"}, {Name: "replayed", Settings: "max_split_size_mb:512"},
					{Name: "what if", Settings: "expandable_segments:True", Outcome: "serves the request that failed"}}
			}
			d.Devices = append(d.Devices, x)
		}
		text := d.Page().text()
		for line := range strings.Lines(text) {
			if len(strings.TrimRight(line, "\n")) > 80 {
				t.Fatalf("the line is too long: %q", line)
			}
		}
		if n := strings.Count(text, "\n"); n > 24 || !strings.Contains(text, "--long") {
			t.Fatalf("%d lines:\n%s", n, text)
		}
		first := d.byInterest()[0]
		if !strings.Contains(text, fmt.Sprintf("device %d", first.Device)) ||
			len(first.Failed) > 0 && !strings.Contains(text, "1.00 MiB wanted") {
			t.Fatalf("the device that failed is not shown:\n%s", text)
		}
		whole := d.Page()
		whole.Screen.Long = true
		all := whole.text()
		if strings.Count(all, "\n") <= strings.Count(text, "\n") || strings.Contains(all, "--long") {
			t.Fatalf("all is not more:\n%s", all)
		}
	})
}
