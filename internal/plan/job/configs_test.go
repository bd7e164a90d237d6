package job

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jedib0t/go-pretty/v6/text"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/goldentest"
	"plimsoll/internal/input/recipe"
)

// inRepository copies a file to a folder, with the file that it names, which lies flat beside it.
func inRepository(t *testing.T, c filestest.PublicConfig) string {
	t.Helper()
	content, err := os.ReadFile(c.Path)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	for _, named := range configNamed.FindAllStringSubmatch(string(content), -1) {
		repository, _, _ := strings.Cut(c.Name, "__")
		flat, _ := filepath.Glob(filepath.Join(filepath.Dir(c.Path),
			repository+"__*"+strings.ReplaceAll(named[1], "/", "_")))
		if len(flat) == 0 {
			continue
		}
		if other, err := os.ReadFile(flat[0]); err == nil {
			path := filepath.Join(folder, named[1])
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, other, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	path := filepath.Join(folder, c.Name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

var configNamed = regexp.MustCompile(`[:\s"']([\w./-]+\.json)\b`)

// planPublic resolves the job of a file, with a Llama where the file names no model.
func planPublic(path string) error {
	q := Request{Configs: []string{path}, GPUs: 8, GPU: "H100-80GB"}
	f, err := recipe.LoadFramework(path, recipe.Source{})
	if err != nil {
		return err
	}
	if f == nil || f.Model == "" {
		q.Model = "llama-3.1-8b"
	}
	_, err = q.Resolve()
	for gpus := 4; err != nil && gpus > 0; gpus /= 2 {
		q.GPUs = gpus
		if _, fewer := q.Resolve(); fewer == nil {
			err = nil
		}
	}
	for q.GPUs, q.Nodes = 8, 2; err != nil && q.Nodes <= 8; q.Nodes *= 2 {
		if _, more := q.Resolve(); more == nil {
			err = nil
		}
	}
	return err
}

// why returns what a file is refused for, in few words.
func why(err error) string {
	var bad *fault.Input
	if !errors.As(err, &bad) {
		return "an internal error: " + err.Error()
	}
	for _, short := range []struct {
		pattern string
		is      string
	}{
		{`^unknown model`, "a model that the catalog does not have"},
		{`names weights that are quantized`, "weights that are quantized"},
		{`^this seems to be an? (.*), as it has`, "$1"},
		{`^plimsoll knows no training configuration`, "no training configuration"},
		{`^this is (TOML or INI|not JSON)`, "$1"},
		{`^this file is for --model`, "config.json of a model"},
		{`^plimsoll cannot plan the optimizer "(.*)"`, "the optimizer $1"},
		{`a variable: this file is a template`, "a template with variables"},
		{`^(\S+) names .* does not exist`, "a file that `$1` names and that does not exist"},
		{`knows no key "(.*)" in (\S+)`, "`$2.$1`, which the program does not know"},
		{`knows no key "(.*)" at the top`, "`$1`, which the program does not know"},
		{`^"(\S+)" is listed twice`, "a key that is listed twice"},
		{`^base_model is trained in full without flash`, "full training without flash attention"},
		{`^target_modules matches`, "an adapter of experts"},
		{`^distributed_type is (\S+),`, "`distributed_type` $1"},
		{`^(\S+) `, "`$1`"},
	} {
		if at := regexp.MustCompile(short.pattern).FindStringSubmatchIndex(bad.What); at != nil {
			return string(regexp.MustCompile(short.pattern).ExpandString(nil, short.is, bad.What, at))
		}
	}
	return bad.What
}

// outcomes are what becomes of the files of one family.
type outcomes struct {
	planned, refused int
	reasons          map[string]int
}

// TestPublicConfigs gives the configurations of public projects to --config. No file of another kind is planned. The
// counts and reasons are those in docs/inputs.md.
func TestPublicConfigs(t *testing.T) {
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	byFamily := map[string]*outcomes{}
	for _, c := range filestest.PublicConfigs(t, "../../../../shared/data/configs") {
		path := inRepository(t, c)
		err := planPublic(path)
		name := c.Family
		flag, refused := recipe.Detect(path, nil)
		switch {
		case c.Kind == "other" && refused != nil || flag == "--model":
			name = "of another kind"
		case flag == recipe.MegatronFlag:
			name = "NeMo"
		}
		o := byFamily[name]
		if o == nil {
			o = &outcomes{reasons: map[string]int{}}
			byFamily[name] = o
		}
		if err == nil {
			o.planned++
			continue
		}
		o.refused++
		o.reasons[why(err)]++
		t.Logf("%s: %v", c.Name, err)
	}
	if other := byFamily["of another kind"]; other == nil || other.planned > 0 {
		t.Errorf("files of another kind are planned: %+v", other)
	}
	checkTable(t, byFamily)
}

// checkTable compares the table in the docs, or writes it.
func checkTable(t *testing.T, byFamily map[string]*outcomes) {
	table := "| family | planned | refused |\n|---|---|---|\n"
	list := ""
	for _, family := range slices.Sorted(maps.Keys(byFamily)) {
		o := byFamily[family]
		table += fmt.Sprintf("| %s | %d | %d |\n", family, o.planned, o.refused)
		var reasons []string
		for _, reason := range slices.Sorted(maps.Keys(o.reasons)) {
			reasons = append(reasons, fmt.Sprintf("%s (%d)", reason, o.reasons[reason]))
		}
		if len(reasons) > 0 {
			list += text.WrapSoft("* "+family+": "+strings.Join(reasons, "; "), 116) + "\n"
		}
	}
	list = trailing.ReplaceAllString(list, "\n")
	list = strings.ReplaceAll(list, "\n", "\n  ")
	list = strings.ReplaceAll(list, "\n  * ", "\n* ")
	want := table + "\nWhy files are refused, with the number of files:\n\n" + strings.TrimSpace(list) + "\n"
	const path = "../../../docs/inputs.md"
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(page), "<!-- table -->\n\n")
	was, after, ends := strings.Cut(rest, "\n<!-- end of table -->")
	if !found || !ends {
		t.Fatalf("%s has no place for the table", path)
	}
	if *goldentest.Update {
		made := before + "<!-- table -->\n\n" + want + "\n<!-- end of table -->" + after
		if err := os.WriteFile(path, []byte(made), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if diff := cmp.Diff(was, want); diff != "" {
		t.Errorf("the table in %s differs (-there +now), see -update:\n%s", path, diff)
	}
}

var trailing = regexp.MustCompile(` +\n`)

// TestTexts: texts stand for files that are named by others, for one request and not for the next to it.
func TestTexts(t *testing.T) {
	file := filestest.InNewFolder(t)
	const zero = `{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}, "zero_optimization": {"stage": %d}}`
	inner := file("ds.json", fmt.Sprintf(zero, 1))
	q := Request{Model: "qwen2.5-0.5b", GPU: "L40S", GPUs: 2,
		TrainingArgs: file("args.json", fmt.Sprintf(`{"bf16": true, "deepspeed": %q}`, inner))}
	var all sync.WaitGroup
	for stage := range 4 {
		all.Go(func() {
			with := q
			if stage > 1 {
				with.Texts = files.Texts{inner: fmt.Appendf(nil, zero, stage)}
			}
			j, err := with.Resolve()
			if err != nil || j.DeepSpeed.ZeROStage != max(1, stage) {
				t.Errorf("stage %d: %+v, %v", stage, j, err)
			}
		})
	}
	all.Wait()
}
