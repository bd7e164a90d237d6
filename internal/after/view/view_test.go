//go:build linux

package view

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// recorded is a state of ranks that grow by a GiB a second, on a host of 1 TiB.
func recorded(ranks, seconds int) *State {
	s := &State{}
	s.Add(&samples.Record{Start: &samples.Start{Job: "j\x1b[2Job", Command: []string{"python"}}})
	for second := range seconds {
		held := ledger.Bytes(second+1) * ledger.GiB
		sample := &samples.Sample{Node: samples.Node{Memory: ledger.TiB}}
		sample.Node.Available = ledger.TiB - held*ledger.Bytes(ranks)
		for rank := range ranks {
			sample.Processes = append(sample.Processes, samples.Process{PID: 100 + rank, Rank: rank,
				Role: samples.RankProcess, Phase: ledger.Forward, Resident: samples.Kinds{Anonymous: held}, Peak: held,
				ProportionalAge: -1, AddressSpaceLimit: -1, CPUTime: time.Duration(second) * 2 * time.Second})
		}
		at := time.Duration(second) * time.Second
		s.Add(&samples.Record{Time: at, Sample: sample})
		for rank := range ranks {
			mark := &samples.Mark{Rank: rank, Phase: ledger.Forward, Step: int64(second + 1)}
			s.Add(&samples.Record{Time: at, Mark: mark})
		}
		s.Add(&samples.Record{Time: at,
			Output: &samples.Output{Stream: "stdout", Lines: []string{"\x1b[31mred\tline\r"}}})
	}
	return s
}

// TestLinesFit: every line fits every width, and a screen has as many lines as the terminal.
func TestLinesFit(t *testing.T) {
	s := recorded(64, 30)
	for width := range 130 {
		for _, height := range []int{0, 1, 5, 24, 80} {
			for _, pane := range []Pane{Table, Lines, Help} {
				lines := s.Render(Screen{Width: width, Height: height, Pane: pane, Scroll: 3, Keys: "q leave"})
				if width > 0 && height > 0 && len(lines) != height {
					t.Fatalf("%dx%d has %d lines", width, height, len(lines))
				}
				for _, l := range lines {
					if ansi.StringWidth(l) > width {
						t.Fatalf("a line is wider than %d: %q", width, l)
					}
				}
			}
		}
	}
}

// TestText: the table has what the ranks hold, their cores, and the time of a step.
func TestText(t *testing.T) {
	text := recorded(2, 30).Text(80)
	for _, want := range []string{"job job", "0        forward        30   1.00  30.0 GiB  30.0 GiB   2.0 ▁",
		"all                                60.0 GiB", "headroom   964 GiB until the memory of the host is full",
		"the memory of the host is full in about 8 min at the present growth"} {
		if !strings.Contains(text, want) {
			t.Errorf("the text has no %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "\x1b") {
		t.Errorf("the text has escape sequences:\n%q", text)
	}
}

// TestManyRanksScroll: the last row is shown at the end of the table.
func TestManyRanksScroll(t *testing.T) {
	s := recorded(64, 3)
	shows := func(scroll int, row string) bool {
		text := strings.Join(s.Render(Screen{Width: 80, Height: 24, Scroll: scroll}), "\n")
		return strings.Contains(text, "\n"+row+" ")
	}
	if !shows(0, "0") || shows(0, "63") || !shows(1000, "63") || shows(1000, "0") {
		t.Error("the table does not scroll")
	}
}

// TestHistory: a long history keeps its largest size.
func TestHistory(t *testing.T) {
	var h history
	for second := range 10_000 {
		b := ledger.GiB
		if second == 7000 {
			b = 2 * ledger.GiB
		}
		h.add(time.Duration(second)*time.Second, b)
	}
	if spark := h.spark(40); len([]rune(spark)) != 40 || strings.Count(spark, "█") != 1 ||
		[]rune(spark)[27] != '█' {
		t.Errorf("the history is %q", spark)
	}
}

// TestUnprinted: the last lines come first, and then each line once.
func TestUnprinted(t *testing.T) {
	s := &State{}
	print := func(n int) {
		for i := range n {
			s.Add(&samples.Record{Output: &samples.Output{Stream: "stdout", Lines: []string{fmt.Sprint(i)}}})
		}
	}
	print(50)
	if got := s.unprinted(); len(got) != firstPrinted || got[0].text != "30" {
		t.Errorf("at first %d lines: %+v", len(got), got)
	}
	print(3)
	if got := s.unprinted(); len(got) != 3 || len(s.unprinted()) != 0 {
		t.Errorf("later %d lines", len(got))
	}
}

func BenchmarkAddAndRender(b *testing.B) {
	s, next := recorded(8, 60), 60*time.Second
	for b.Loop() {
		next += time.Second
		s.Add(&samples.Record{Time: next, Sample: s.sample})
		s.Render(Screen{Width: 120, Height: 40})
	}
}
