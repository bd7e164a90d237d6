package shell

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
)

// commands returns the commands of a script with spaces between their words.
func commands(t *testing.T, script string) (list []string) {
	t.Helper()
	s, err := Read("run.sh", []byte(script), nil, nil)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	for _, c := range s.Commands {
		list = append(list, c.Text())
	}
	return list
}

// TestCommands reads commands as Bash does: redirections are no arguments, nor are documents commands.
func TestCommands(t *testing.T) {
	for script, want := range map[string][]string{
		"a --x 1 > log 2>&1":                                    {"a --x 1"},
		"a --x 1 >log 2>err --y 2":                              {"a --x 1 --y 2"},
		"a --x 1 &> log":                                        {"a --x 1"},
		"a --x 1 &>> log; b":                                    {"a --x 1", "b"},
		"a --x 1 < /dev/null":                                   {"a --x 1"},
		"a --x 1>&2":                                            {"a --x"},
		"a --x 'a > b' \"c < d\" e\\>f":                         {"a --x a > b c < d e>f"},
		"a --x 1 2>&1 | tee log &":                              {"a --x 1", "tee log"},
		"a > >(tee -a log) 2> >(tee err) --x":                   {"a --x"},
		"a --x < <(b --y 1) --z":                                {"a --x --z"},
		"cat <<EOF > f\n{\"a\": 1}\nEOF\na --x":                 {"cat", "a --x"},
		"cat <<-'E' | b\n\tone\n\tE\na":                         {"cat", "b", "a"},
		"cat <<A <<B\n1\nA\n2\nB\na":                            {"cat", "a"},
		"cat <<< text\na":                                       {"cat", "a"},
		"[[ 1 > 2 ]] && a\nb > c":                               {"b"},
		"a --x > $(date +%s).log --y":                           {"a --x --y"},
		"a > \"log of $x.txt\" \\\n  --y 2":                     {"a --y 2"},
		"(cd x && a) ; { b; }":                                  {"cd x", "a", "b"},
		"time -p a --x # --y":                                   {"a --x"},
		"nohup a 'it''s' \"x\"y &":                              {"nohup a its xy"},
		"bash -c \"a --x $y; b\"":                               {"a --x $y", "b"},
		"srun -N 2 bash -lc 'a && b'":                           {"srun -N 2 a", "srun -N 2 b"},
		"C='a --x'; eval \"$C --y\"":                            {"a --x --y"},
		"f() { a --x $1 \"$@\"; }; f 1 2":                       {"a --x 1 1 2"},
		"a \"$@\" $* $#":                                        {"a 0"},
		"a {b,c}d '{b,c}' ~/x *.y":                              {"a bd cd {b,c} ~/x *.y"},
		"for i in 1 2; do X+=$i; a $X; done; b":                 {"a 1", "b"},
		"for ((i=0; i<3; i++)); do X+=$i; done; a $X $i":        {"a 012 3"},
		"for ((i=4; i>0; i--)); do X+=$i; done; a $X":           {"a 4321"},
		"n=5; for ((i=1; i<n; i+=2)); do a $i; done; b $i":      {"a 1", "b 5"},
		"for ((i=0; i<$N; i++)); do X=1; done; a $X":            {"a $X"},
		"for ((i=0; ; i++)); do X=1; done; a $X":                {"a $X"},
		"for ((i=0; i<9; i*=2)); do X=1; done; a $X":            {"a $X"},
		"X=1; for ((i=2; i<2; i++)); do X=2; done; a $X":        {"a 1"},
		"printf -v X '[%s]' 1; a $X":                            {"a [1]"},
		"printf -v X '%d' 1; a $X":                              {"a $X"},
		"L=(1 2 3); X=$(IFS=', '; echo \"${L[*]}\"); a $X $IFS": {"a 1,2,3 $IFS"},
		"a $(seq 2 3 9)":                                        {"a 2 5 8"},
		"A=1 \\\n# B=2 \\\na \\\n  --x \\\n # --y \\\n  --z":    {"a --x", "--z"},
		"read -r -d '' C <<EOF\na \\\n --x $y\nEOF\nb $C":       {"b a --x $y"},
		"L=\"a --x $(b c)\"; srun bash -c \"$L --y\"; $L":       {"srun a --x $(b c) --y", "a --x $(b c)"},
		"A=(--x [0]*3+[1]*5 [2]*7 --y); a \"${A[@]}\"":          {"a --x [0]*3+[1]*5 [2]*7 --y"},
		"set -euo pipefail; set -x\na":                          {"a"},
	} {
		if got := commands(t, script); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", script, got, want)
		}
	}
}

// TestValues puts in the values of variables and computes as Bash does. What the script does not say stays as it is.
func TestValues(t *testing.T) {
	const before = "n=8; empty=; list='a  b'; A=(--x 1 \"two words\"); A+=(--y); path=/a/b.yaml; D=0,1,3\n"
	for text, want := range map[string]string{
		"$n": "8", "${n}x": "8x", "${m:-y}": "y", "${m:-$n}": "8", "$m": "$m", "${empty:-z}": "z", "${empty-z}": "",
		"$(expr 32 / 4 / 2)": "4", "$(expr 32 / $n)": "4", "`expr 1 + 2`": "3", "$((16/n))": "2",
		"$(( 16 / $n * 3 ))": "6", "$(expr 1 / 0)": "$(expr 1 / 0)", "$((1/0))": "$((1/0))", "$(date)": "$(date)",
		"$((m+1))": "$((m+1))", "\"$m/$n\"": "$m/8", "'$n'": "$n", "$list": "a|b", "\"$list\"": "a  b",
		"\"${A[@]}\"": "--x|1|two words|--y", "${A[@]}": "--x|1|two|words|--y", "\"${A[*]}\"": "--x 1 two words --y",
		"${#A[@]}": "4", "${A[1]}": "1", "${path##*/}": "b.yaml", "${path%.yaml}.json": "/a/b.json", "${n/8/9}": "9",
		"$(echo $D | tr ',' '\\n' | wc -l)": "3", "$(awk -F',' '{print NF}' <<< \"$D\")": "3",
		"$(nvidia-smi -L | wc -l)": "$(nvidia-smi -L | wc -l)", "${m:+x}": "", "${n:+x}": "x", "${!n}": "${!n}",
		"$(echo $D | grep -o , | wc -l)": "2", "${m:?unset}": "${m:?unset}", "\\$n": "$n",
		"${m:=}x": "x", "${m=}x": "x", "${empty:=}x": "x",
	} {
		s, err := Read("", []byte(before+"a "+text), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		var got []string
		for _, w := range s.Commands[0].Words[1:] {
			got = append(got, w.Text)
		}
		if strings.Join(got, "|") != want {
			t.Errorf("%s becomes %q, want %q", text, got, want)
		}
	}
}

// TestConditions follows conditions whose values the script says, and names the others.
func TestConditions(t *testing.T) {
	const onFile = "the condition [ -f x ]"
	for script, want := range map[string]string{
		"if [ 8 -gt 4 ]; then a; else b; fi":                             "a",
		"X=no; if [[ $X == yes ]]; then a; elif [ -z \"\" ]; then b; fi": "b",
		"X=7B; case $X in 7*) a;; *) b;; esac":                           "a",
		"[ -z $X ] && a":                                                 "a",
		"[ -n \"$X\" ] || a":                                             "a",
		"if (( 2 > 1 )); then a; fi":                                     "a",
		"if [ ! 1 = 2 -a 3 != 4 ]; then a; fi":                           "a",
		"if ! [[ ab =~ ^b ]]; then a; fi":                                "a",
		"if [ $# -lt 1 ]; then a; fi":                                    "a",
		"if [ -f x ]; then a; else b; fi":                                "a: " + onFile + "; b: " + onFile,
		"N=$(id -u); if [ $N -gt 1 ]; then a $N; fi":                     "a $(id -u): the condition [ $N -gt 1 ]",
		"[ a = a ] && { [ b = c ] || [ c = c ]; } && N=2; a $N":          "a 2",
		"if { true; [ a = b ]; }; then N=1; else N=2; fi; a $N":          "a 2",
		"[ -d x ] && N=2; a $N":                                          "a $N",
		"N=2; [ -d x ] && N=2; a $N":                                     "a 2",
		"if [ -f x ]; then N=1; else N=2; fi; if [ $N = 1 ]; then a; fi": "a: the condition [ $N = 1 ]",
		"mkdir x && a":      "mkdir x; a",
		"cd x || exit 1; a": "cd x; a",
		// A script that ends with an error where a variable is absent demands it of whoever starts it.
		"[ -z \"$N\" ] && { echo no; exit 1; }; a $N":          "a $N",
		"if [[ -z $N ]]; then usage; B=1; exit 1; fi; a $N $B": "a $N $B",
		"[ -z $N ] && exit 1; if [ $N = 8 ]; then a; else b; fi": "a: the condition [ $N = 8 ]; b: the condition " +
			"[ $N = 8 ]",
		"[ $# = 1 ] || exit 1; if [ $1 = 8 ]; then a; else b; fi": "a: the condition [ $1 = 8 ]; b: the condition " +
			"[ $1 = 8 ]",
		"[[ -n $N ]] || exit 2; a":                                 "a",
		"if [ -z $N ]; then a; exit 0; fi; b":                      "a",
		"N=; if [ -z $N ]; then a; exit 1; fi; b":                  "b",
		"N=\"\"; [ -n \"$N\" ] || exit 1; b $N":                    "b $N",
		"N=; [ -z $N ] && exit 0; b":                               "",
		"N=1; if [ $N = 1 ]; then exit 1; fi; b":                   "",
		"case $1 in x) a;; *) exit 1;; esac; b":                    "a: the condition $1; b",
		"case $N in x) a;; *) exit 0;; esac; b":                    "",
		"M=${1:?}; case $M in x) a;; *) b;; esac":                  "a: the condition $M; b: the condition $M",
		"for i in 1 2; do for j in 3 4; do a $i $j; done; done; b": "a 1 3; b",
		"for i in 1 2; do bash -c \"cd $i && a --x $i\"; done":     "cd 1; a --x 1",
		"if [ $# -lt 1 ]; then a; exit 1; fi; b":                   "b",
		"for f in *.txt; do a $f; done":                            "a $f: the loop over f",
		"N=1; while read l; do N=2; done; a $N":                    "a 1",
		"if command -v x; then a; fi":                              "command -v x; a: the condition command -v x",
	} {
		s, err := Read("", []byte(script), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", script, err)
		}
		var got []string
		for _, c := range s.Commands {
			text := c.Text()
			if c.Unsure != "" {
				text += ": " + c.Unsure
			}
			got = append(got, text)
		}
		if strings.Join(got, "; ") != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
}

// TestVariables: a command sees the variables that are exported before it, and those on its own line.
func TestVariables(t *testing.T) {
	const script = "A=1\nexport B=2 C\nC=3\nX=4 a\nexport A=5\nb\nunset B\nc\n"
	s, err := Read("", []byte(script), map[string]Word{"HOST": {Text: "h"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"A=1- B=2 X=4 HOST=h", "A=5 B=2 HOST=h", "A=5 HOST=h"} {
		var got []string
		for _, name := range []string{"A", "B", "X", "HOST"} {
			value, _, exported, set := s.Commands[i].Variable(name)
			if text := name + "=" + value.Text; set && exported {
				got = append(got, text)
			} else if set {
				got = append(got, text+"-")
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s sees %q, want %q", s.Commands[i].Text(), got, want)
		}
	}
}

// TestWritten keeps the files that a script writes.
func TestWritten(t *testing.T) {
	s, err := Read("", []byte("N=2\ncat > ds.json <<EOF\n{\"n\": $N}\nEOF\ncat <<'E' | tee x\n$N\nE\n"), nil, nil)
	if err != nil || s.Written["ds.json"] != "{\"n\": 2}\n" {
		t.Errorf("%q, %v", s.Written, err)
	}
}

// TestRefuses: what Bash does not read is refused with its place, and so is what takes too long.
func TestRefuses(t *testing.T) {
	for script, want := range map[string]string{
		"a\nif b; then c\n":                    "run.sh:2:1: this is no script that Bash reads",
		"a 'x":                                 "run.sh:1:3: this is no script that Bash reads",
		"f() { f; f; }; f":                     "",
		"a=x;" + strings.Repeat("a=$a$a;", 40): "more than",
		"f() { g; g; }; g() { h; h; }; h() { f; f; };" + strings.Repeat("f;", 200): "more than",
	} {
		_, err := Read("run.sh", []byte(script), nil, nil)
		var input *fault.Input
		if err != nil && !errors.As(err, &input) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%.40s: %v, want %q", script, err, want)
		}
	}
}

// FuzzRead: a script is read or refused as bad input, in a time that its length bounds.
func FuzzRead(f *testing.F) {
	for _, script := range []string{"a --x $y | b &", "A=(1 2); for i in \"${A[@]}\"; do x $i; done",
		"if [ -f x ]; then N=1; fi; f() { y ${N:-2} $((N+1)); }; f 3", "cat <<EOF > f\n$x\nEOF\ncase $X in a) b;; esac",
		"srun bash -c \"a $(echo 1,2 | tr , '\\n' | wc -l)\"", "a {1..9} ${x//a/b} $((1<<70)) $((2**99))"} {
		f.Add(script)
	}
	f.Fuzz(func(t *testing.T, script string) {
		s, err := Read("run.sh", []byte(script), nil, nil)
		var input *fault.Input
		if err != nil && !errors.As(err, &input) {
			t.Fatalf("%v is no fault of the input", err)
		}
		if err == nil {
			for _, c := range s.Commands {
				c.Variable("N")
			}
		}
	})
}

// TestSourced: a script is read with the files that it runs as a part of itself, and with the functions in them.
func TestSourced(t *testing.T) {
	files := map[string]string{
		"jobs/models/small.sh": "ARGS=(--layers 2 --hidden 8)\nstart() { torchrun $UNKNOWN \"$@\"; }\n",
		"jobs/env.sh":          "export NCCL_DEBUG=$1\nsource jobs/run.sh\n. jobs/env.sh\n", "broken.sh": "if"}
	open := func(name string) ([]byte, string, error) {
		if text, is := files[name]; is {
			return []byte(text), name, nil
		}
		return nil, "", fs.ErrNotExist
	}
	const script = `HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "$HERE/models/small.sh"
. "$(dirname $0)/env.sh" INFO
source missing.sh
source broken.sh
source "$HERE/$SIZE.sh"
start train.py ${ARGS[@]}
`
	s, err := Read("jobs/run.sh", []byte(script), nil, open)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Commands) != 1 || s.Commands[0].Text() != "torchrun $UNKNOWN train.py --layers 2 --hidden 8" {
		t.Fatalf("the commands are %v", s.Commands)
	}
	if value, _, exported, _ := s.Commands[0].Variable("NCCL_DEBUG"); value.Text != "INFO" || !exported {
		t.Errorf("NCCL_DEBUG is %q", value.Text)
	}
	var sourced []string
	for _, f := range s.Sourced {
		line := 1 + strings.Count(script[:f.At], "\n")
		sourced = append(sourced, fmt.Sprintf("%d %s %s", line, f.Name, f.Path))
	}
	want := []string{"2 jobs/models/small.sh jobs/models/small.sh", "3 jobs/run.sh ", "3 jobs/env.sh ",
		"3 jobs/env.sh jobs/env.sh", "4 missing.sh ", "5 broken.sh ", "6 jobs/$SIZE.sh "}
	if !slices.Equal(sourced, want) {
		t.Errorf("parts of the script are %q, expected %q", sourced, want)
	}
}
