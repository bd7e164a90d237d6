package ledger

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// rank returns the host memory of a rank in the optimizer step.
func rank(number int, holdings ...Holding) Device {
	d := Device{Kind: Host, Rank: number, Phases: []Phase{{Name: Step, Iteration: Steady}}}
	for _, h := range holdings {
		d.Phases[0].Hold(h)
	}
	return d
}

func TestCompare(t *testing.T) {
	planned := []Device{
		rank(0, Holding{Component: Parameters, Bytes: 8, Why: "2 B x 4"},
			Holding{Component: OptimizerStates, Bytes: 32, Why: "8 B x 4"}),
		rank(1, Holding{Component: MasterWeightsLow, Part: "bf16", Bytes: 6, Why: "2 B x 3"}),
	}
	measured := []Device{
		rank(0, Holding{Component: ExpAvg, Bytes: 16}, Holding{Component: ExpAvgSq.InType("fp32"), Bytes: 17},
			Holding{Component: Process, Bytes: 5, Why: "the program"}),
		rank(1, Holding{Component: MasterWeights, Part: "bf16", Bytes: 7}),
	}
	text, err := json.Marshal(Compare(planned, measured))
	want := `[` + strings.Join([]string{
		`{"device":"host","rank":0,"phase":"step","iteration":"steady",` +
			`"component":"parameters","planned_bytes":8,"measured_bytes":null,"why":"2 B x 4"}`,
		`{"device":"host","rank":0,"phase":"step","iteration":"steady",` +
			`"component":"optimizer_states","planned_bytes":32,"measured_bytes":33,"why":"8 B x 4"}`,
		`{"device":"host","rank":1,"phase":"step","iteration":"steady",` +
			`"part":"bf16","component":"master_weights","planned_bytes":6,"measured_bytes":7,"why":"2 B x 3"}`,
		`{"device":"host","rank":0,"phase":"step","iteration":"steady",` +
			`"component":"process","planned_bytes":0,"measured_bytes":5,"why":"the program"}`,
	}, ",") + `]`
	if err != nil || string(text) != want {
		t.Errorf("%v\n got %s\nwant %s", err, text, want)
	}
	c := Compare(planned, measured)
	if c.Planned(nil) != 46 || c.Measured(nil) != 45 || c.Planned(func(l Line) bool { return l.Rank == 1 }) != 6 {
		t.Error("the sums are wrong")
	}
}

// TestCompareLosesNothing compares the sums of both sides with the devices, for any
// components, in parts and in full.
func TestCompareLosesNothing(t *testing.T) {
	names := []Component{Parameters, OptimizerStates, ExpAvg, ExpAvgSq.InType("fp32"), MasterWeights, MasterWeightsLow,
		Process}
	devices := rapid.Custom(func(t *rapid.T) []Device {
		var list []Device
		for number := range rapid.IntRange(0, 3).Draw(t, "ranks") {
			var holdings []Holding
			for range rapid.IntRange(0, 5).Draw(t, "components") {
				holdings = append(holdings, Holding{
					Component: rapid.SampledFrom(names).Draw(t, "component"),
					Bytes:     Bytes(rapid.Int64Range(0, 1<<40).Draw(t, "bytes")),
				})
			}
			list = append(list, rank(number, holdings...))
		}
		return list
	})
	sum := func(list []Device) Bytes {
		var sum Bytes
		for i := range list {
			sum += list[i].Peak().PeakUsed
		}
		return sum
	}
	rapid.Check(t, func(t *rapid.T) {
		planned, measured := devices.Draw(t, "planned"), devices.Draw(t, "measured")
		c := Compare(planned, measured)
		if c.Planned(nil) != sum(planned) || c.Measured(nil) != sum(measured) {
			t.Fatalf("%d and %d bytes of %d and %d", c.Planned(nil), c.Measured(nil), sum(planned), sum(measured))
		}
	})
}

// TestComponents compares the descriptions with the constants.
func TestComponents(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "component.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	names, titles := map[Component]bool{}, map[string]Component{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || spec.Type == nil || spec.Type.(*ast.Ident).Name != "Component" {
			return true
		}
		c := Component(strings.Trim(spec.Values[0].(*ast.BasicLit).Value, `"`))
		if names[c] {
			t.Errorf("two components are called %s", c)
		}
		names[c] = true
		if other, taken := titles[c.Title()]; taken {
			t.Errorf("%s and %s have one title", c, other)
		}
		titles[c.Title()] = c
		return true
	})
	if len(names) < 50 {
		t.Fatalf("only %d components were found", len(names))
	}
	for c, d := range descriptions {
		if !names[c] || d.partOf != "" && !names[d.partOf] {
			t.Errorf("%s, a part of %q, is no constant", c, d.partOf)
		}
	}
	if p := ExpAvgSq.InType("fp32").PartOf(); p != ExpAvgSq || p.PartOf() != OptimizerStates {
		t.Errorf("exp_avg_sq_fp32 is a part of %s", p)
	}
}
