package strict

import (
	"fmt"
	"testing"

	"plimsoll/internal/base/torchtest"
)

// TestNumbersOfYAML reads words as PyYAML's safe_load does: 010 is 8, 1:30 is 90, and 1e3 is a text.
func TestNumbersOfYAML(t *testing.T) {
	const script = `
import json, sys, yaml
print(json.dumps([[type(x).__name__, str(x)] for x in map(yaml.safe_load, sys.argv[1:])]))
`
	words := []string{"010", "0o10", "1:30", "1:75", "0x10", "0b11", "1_000", "+4", "-0x10", "-1:30", "190:20:30", ".5",
		"1e3", "1.0e3", "1.e+3", "09", "0", "00", "0_7", "yes", "y", "1,000", "0x", "1_"}
	python := torchtest.Answer[[][2]string](t, torchtest.Fresh("yaml"), append([]string{"-c", script}, words...)...)
	for i, word := range words {
		is, shown := python[i][0], python[i][1]
		d, err := ParseYAML("a.yaml", []byte("k: "+word+"\n"))
		if err != nil {
			t.Fatal(err)
		}
		v := d.Root.Members[0].Value
		kind := map[rune]string{'0': "number", '"': "str", 't': "bool", 'f': "bool"}[rune(v.Kind)]
		if kind == "number" {
			whole, _ := v.parseNumber()
			if kind = "float"; whole {
				kind = "int"
			}
		}
		if kind != is && (kind != "int" || is != "float") || is == "int" && fmt.Sprint(v.Integer) != shown {
			t.Errorf("%s is the %s %q (%d), and Python reads the %s %s", word, kind, v.Text, v.Integer, is, shown)
		}
	}
}
