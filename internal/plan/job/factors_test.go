package job

import (
	"errors"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
)

const someFactors = `{"schema": "plimsoll.factors/1", "torch": "2.13", "gpu": "H100-80GB", "ranks": 8,
	"constants": [{"component": "outside_allocator", "bytes": 1000, "why": "measured"}]}`

func TestBadFactors(t *testing.T) {
	if _, err := parseFactors("f.json", []byte(someFactors)); err != nil {
		t.Fatal(err)
	}
	for old, c := range map[string]struct{ to, want string }{
		`"plimsoll.factors/1"`: {`"plimsoll.factors/2"`, "f.json: the schema is"},
		"outside_allocator":    {"gradients", `"gradients" is no component`},
		"1000":                 {"-1", "outside_allocator has -1 bytes"},
		`"ranks": 8`:           {`"ranks": "8"`, "these are no factors"},
		`{"component"`:         {`"component"`, "f.json:2:"},
	} {
		_, err := parseFactors("f.json", []byte(strings.Replace(someFactors, old, c.to, 1)))
		if !errors.As(err, new(*fault.Input)) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.to, err)
		}
	}
}

// FuzzFactors reads any document as factors, without a panic, and never uses impossible sizes.
func FuzzFactors(f *testing.F) {
	f.Add([]byte(someFactors))
	f.Fuzz(func(t *testing.T, text []byte) {
		factors, err := parseFactors("f.json", text)
		if err != nil {
			if !errors.As(err, new(*fault.Input)) {
				t.Fatal(err)
			}
			return
		}
		for _, c := range factors.Constants {
			if c.Bytes < 0 || c.Bytes > maxConstant {
				t.Errorf("%+v", c)
			}
		}
	})
}
