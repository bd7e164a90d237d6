package recipe

import (
	"slices"
	"strings"
	"testing"
)

// TestShellCommands reads commands as Bash does: redirections are no arguments, nor are documents commands.
func TestShellCommands(t *testing.T) {
	for script, want := range map[string][]string{
		"a --x 1 > log 2>&1":                    {"a --x 1"},
		"a --x 1 >log 2>err --y 2":              {"a --x 1 --y 2"},
		"a --x 1 &> log":                        {"a --x 1"},
		"a --x 1 &>> log; b":                    {"a --x 1", "b"},
		"a --x 1 < /dev/null":                   {"a --x 1"},
		"a --x 1>&2":                            {"a --x"},
		"a --x 'a > b' \"c < d\" e\\>f":         {"a --x a > b c < d e>f"},
		"a --x 1 2>&1 | tee log &":              {"a --x 1", "tee log"},
		"a > >(tee -a log) 2> >(tee err) --x":   {"a --x"},
		"a --x <(b --y 1) --z":                  {"a --x --z"},
		"cat <<EOF > f\n{\"a\": 1}\nEOF\na --x": {"cat", "a --x"},
		"cat <<-'E' | b\n\tone\n\tE\na":         {"cat", "b", "a"},
		"cat <<A <<B\n1\nA\n2\nB\na":            {"cat", "a"},
		"cat <<< text\na":                       {"cat", "a"},
		"[[ 1 > 2 ]] && a\nb > c":               {"[[ 1 > 2 ]]", "a", "b"},
		"a --x > $(date +%s).log --y":           {"a --x --y"},
		"a > \"log of $x.txt\" \\\n  --y 2":     {"a --y 2"},
		"cat <<EOF\nnever ends":                 {"cat"},
		"a >":                                   {"a"},
	} {
		var got []string
		for _, command := range shellCommands(script) {
			var words []string
			for _, w := range command {
				words = append(words, w.text)
			}
			got = append(got, strings.Join(words, " "))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", script, got, want)
		}
	}
}
