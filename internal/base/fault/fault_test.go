package fault

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
)

func TestPosition(t *testing.T) {
	text := []byte("one\ntwo\n")
	for offset, want := range map[int64]string{-1: "f:1:1", 0: "f:1:1", 3: "f:1:4", 4: "f:2:1", 6: "f:2:3", 8: "f:3:1",
		99: "f:3:1"} {
		if got := At("f", text, offset).String(); got != want {
			t.Errorf("offset %d is %s, want %s", offset, got, want)
		}
	}
}

func TestMessage(t *testing.T) {
	for _, test := range []struct {
		fault Input
		want  string
	}{
		{Input{What: "too many ranks"}, "too many ranks"},
		{Input{Where: Position{File: "a.json"}, Err: fs.ErrNotExist}, "a.json: file does not exist"},
		{Input{
			Where: Position{"a.json", 2, 7},
			What:  "stage is 4",
			Hint:  "use 0 to 3",
			Err:   errors.New("cause"),
		}, "a.json:2:7: stage is 4: cause\n  hint: use 0 to 3"},
		{*Inputf("%d ranks", 0), "0 ranks"},
		{*File("a.json").Inputf("no stage").WithHint("give one"), "a.json: no stage\n  hint: give one"},
		{*At("a.json", []byte("\n{"), 1).Inputf("stage is %d", 4), "a.json:2:1: stage is 4"},
	} {
		if got := test.fault.Error(); got != test.want {
			t.Errorf("got %q, want %q", got, test.want)
		}
	}
	if !errors.Is(&Input{Err: fs.ErrNotExist}, fs.ErrNotExist) {
		t.Error("the cause is not reached")
	}
}

func TestInternal(t *testing.T) {
	err := error(&Internal{Err: &Input{What: "an allocation of -1 bytes"}})
	if errors.As(err, new(*Input)) {
		t.Error("a fault of the program is taken for bad input")
	}
	for _, part := range []string{"a fault of plimsoll", "report it with the command line",
		"an allocation of -1 bytes"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
}

func TestNearest(t *testing.T) {
	known := []string{"offload_optimizer", "offload_param", "stage", "llama-3-8b"}
	for name, want := range map[string]string{
		"offload_optimiser": "offload_optimizer", "Stage": "stage", "sage": "stage", "llama3-8b": "llama-3-8b",
		"stgae": "stage",
		"batch": "", "": "", "x": "", "rage": "", // half of the letters of rage differ: another word
	} {
		if got := Nearest(name, known); got != want {
			t.Errorf("nearest to %q is %q, want %q", name, got, want)
		}
	}
}

// TestNearestParameter: a parameter of another layer, expert or projection is no misspelling.
func TestNearestParameter(t *testing.T) {
	known := []string{"layers.3.mlp.weight", "layers.13.mlp.w1", "layers.1.experts.3.w1", "norm.weight"}
	for name, want := range map[string]string{
		"layers.3.mlp.wieght": "layers.3.mlp.weight", "layer.3.mlp.weight": "layers.3.mlp.weight",
		"layers.13.mpl.w1": "layers.13.mlp.w1", "norms.weight": "norm.weight",
		"layers.13.mlp.weight": "", "layers.13.mlp.w2": "", "layers.3.experts.1.w1": "", "layers.03.mlp.weight": "",
		"layers.1.experts.3.w2": "", "norm.1.weight": "", "layers.mlp.weight": "",
	} {
		if got := NearestParameter(name, known); got != want {
			t.Errorf("nearest to %q is %q, want %q", name, got, want)
		}
	}
}

func TestOneOf(t *testing.T) {
	for want, names := range map[string][]string{
		"":                   nil,
		"bf16":               {"bf16"},
		"split or fp32":      {"split", "fp32"},
		"bf16, fp16 or fp32": {"bf16", "fp16", "fp32"},
	} {
		if got := OneOf(names...); got != want {
			t.Errorf("%q: %q, want %q", names, got, want)
		}
	}
}
