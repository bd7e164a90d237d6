package report

import (
	"slices"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
	"pgregory.net/rapid"

	"plimsoll/internal/base/ledger"
)

// barred returns a device with a capacity of 40 GiB, whose second phase holds 50.
func barred() ledger.Device {
	load := ledger.Phase{Name: ledger.Load, PeakUsed: 10 * ledger.GiB,
		Components: []ledger.Holding{{Component: ledger.Parameters, Bytes: 10 * ledger.GiB}}}
	step := ledger.Phase{Name: ledger.Step, Iteration: ledger.First, PeakUsed: 50 * ledger.GiB,
		Components: []ledger.Holding{
			{Component: ledger.ExpAvg, Bytes: 10 * ledger.GiB}, {Component: ledger.ExpAvgSq, Bytes: 10 * ledger.GiB},
			{Component: ledger.Parameters, Bytes: 10 * ledger.GiB},
		}}
	return ledger.Device{Kind: ledger.GPU, Capacity: 40 * ledger.GiB, Phases: []ledger.Phase{load, step}}
}

// TestPalette: what is large on a small device has a letter, however much a large device holds.
func TestPalette(t *testing.T) {
	phase := func(unit ledger.Bytes, components ...ledger.Component) []ledger.Phase {
		p := ledger.Phase{Name: ledger.Step, PeakUsed: unit * ledger.Bytes(len(components))}
		for _, c := range components {
			p.Components = append(p.Components, ledger.Holding{Component: c, Bytes: unit})
		}
		return []ledger.Phase{p}
	}
	small := ledger.Device{Kind: ledger.GPU, Phases: phase(ledger.MiB, ledger.LogitsAndLoss)}
	var many []ledger.Component
	for i := range 2 * len(hues) {
		many = append(many, ledger.Component(strings.Repeat("x", i+1)))
	}
	large := ledger.Device{Kind: ledger.Host, Phases: phase(ledger.GiB, many...)}
	palette := paletteOf([]ledger.Device{small, large})
	if len(palette) != len(hues)+2 {
		t.Fatalf("%d pigments", len(palette))
	}
	if !slices.ContainsFunc(palette, func(g pigment) bool { return g.component == wholeOf(ledger.LogitsAndLoss) }) {
		t.Errorf("no letter for all that the small device holds: %v", palette)
	}
}

func TestBars(t *testing.T) {
	d := barred()
	b := Bars{Device: &d, palette: paletteOf([]ledger.Device{d})}
	for _, test := range []struct {
		name   string
		screen Screen
		want   string
	}{
		{"in a file", Screen{}, `GPU of rank 0                                          40.0 GiB
load        PPPPPPPPPPPP                                  │             10.0 GiB
step, first PPPPPPPPPPPPOOOOOOOOOOOOOOOOOOOOOOO-----------│-----------  50.0 GiB
  P parameters  O optimizer states  - reserved, but not in use
`},
		{"narrow, without Unicode", Screen{Width: 45, ASCII: true}, `GPU of rank 0              40.0 GiB
load        PPPPP             |      10.0 GiB
step, first PPPPPOOOOOOOOO----|----  50.0 GiB
  P parameters  O optimizer states
  - reserved, but not in use
`},
		{"with colors", Screen{Width: 45, Color: true}, `GPU of rank 0              40.0 GiB
load        █████             │      10.0 GiB
step, first ██████████████████│████  50.0 GiB
  █ parameters  █ optimizer states
  █ reserved, but not in use
`},
	} {
		page := &Page{Sections: []Section{{b}}, Screen: test.screen}
		got := page.text()
		if colored := strings.Contains(got, "\x1b[34m█████\x1b[m"); colored != test.screen.Color {
			t.Errorf("%s: colors %v, want %v: %q", test.name, colored, test.screen.Color, got)
		}
		if got := ansi.Strip(got); got != test.want {
			t.Errorf("%s: got\n%s\nwant\n%s", test.name, got, test.want)
		}
	}
}

// TestBarsOfAnything: bars keep within any screen, and every phase has its line.
func TestBarsOfAnything(t *testing.T) {
	size := rapid.Custom(func(t *rapid.T) ledger.Bytes {
		return ledger.Bytes(rapid.Int64Range(0, 1<<42).Draw(t, "bytes"))
	})
	rapid.Check(t, func(t *rapid.T) {
		d := ledger.Device{Kind: ledger.Host, Capacity: size.Draw(t, "capacity"),
			Count: rapid.IntRange(1, 999).Draw(t, "count")}
		components := []ledger.Component{ledger.Parameters, ledger.Gradients, ledger.ExpAvg, ledger.LoadStaging,
			ledger.NCCL, ledger.PythonProcess, ledger.LogitsAndLoss, ledger.OptimizerTemporaries}
		for range rapid.IntRange(1, 5).Draw(t, "phases") {
			p := ledger.Phase{Name: ledger.Backward, Iteration: ledger.Steady, PeakUsed: size.Draw(t, "used")}
			for range rapid.IntRange(0, 9).Draw(t, "components") {
				p.Components = append(p.Components, ledger.Holding{Bytes: size.Draw(t, "held"),
					Component: rapid.SampledFrom(components).Draw(t, "component")})
			}
			d.Phases = append(d.Phases, p)
		}
		width := rapid.IntRange(leastWidth, 200).Draw(t, "width")
		page := &Page{Sections: []Section{{Bars{Device: &d, palette: paletteOf([]ledger.Device{d})}}},
			Screen: Screen{Width: width}}
		for line := range strings.Lines(page.text()) {
			if n := widthOf(strings.TrimSuffix(line, "\n")); n > width {
				t.Fatalf("a line of %d columns on a screen of %d:\n%s", n, width, page.text())
			}
		}
	})
}
