package job

import (
	"encoding/csv"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"plimsoll/fault"
	"plimsoll/model"
	"plimsoll/recipe"
)

var update = flag.Bool("update", false, "write the table in docs/inputs.md")

// publicConfig is a configuration of a public project.
type publicConfig struct{ path, name, repository, kind, family string }

// publicConfigs returns the rows of the index. Where it is missing, the test is skipped, but not in CI.
func publicConfigs(t *testing.T) []publicConfig {
	t.Helper()
	const folder = "../../shared/data/configs"
	file, err := os.Open(filepath.Join(folder, "INDEX.tsv"))
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip("there are no public configurations here: ", err)
	}
	defer file.Close()
	table := csv.NewReader(file)
	table.Comma, table.LazyQuotes, table.FieldsPerRecord = '\t', true, -1
	rows, err := table.ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	var list []publicConfig
	for _, row := range rows[1:] {
		list = append(list, publicConfig{filepath.Join(folder, row[0]), row[0], row[1], row[2], row[3]})
	}
	return list
}

// inRepository copies a file to a folder, with the file that it names, which lies flat beside it.
func (c publicConfig) inRepository(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(c.path)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	for _, named := range configNamed.FindAllStringSubmatch(string(text), -1) {
		flat := strings.Split(c.name, "__")[0] + "__" + strings.ReplaceAll(named[1], "/", "_")
		if other, err := os.ReadFile(filepath.Join(filepath.Dir(c.path), flat)); err == nil {
			path := filepath.Join(folder, named[1])
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, other, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	path := filepath.Join(folder, c.name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

var configNamed = regexp.MustCompile(`[:\s"']([\w./-]+\.json)\b`)

// catalogued returns the name in the catalog for a model of the hub, or "" if it has none.
func catalogued(hub string) string {
	name := strings.ToLower(hub[strings.LastIndexByte(hub, '/')+1:])
	name = strings.TrimPrefix(name, "meta-")
	name = modelSuffix.ReplaceAllString(name, "")
	for _, known := range model.Catalog() {
		if name == known {
			return known
		}
	}
	return ""
}

var modelSuffix = regexp.MustCompile(`(-(instruct|base|hf|v0\.\d|deduped|4k|\d{4}))+$`)

// planPublic resolves the job of a file. It gives the model where the file does not, or names it as the hub does.
func planPublic(path string) (error, string) {
	q := Request{Configs: []string{path}, GPUs: 8, GPU: "H100-80GB"}
	f, err := recipe.LoadFramework(path)
	if err != nil {
		return err, ""
	}
	if q.Model = "llama-3.1-8b"; f != nil {
		q.Model = catalogued(f.Model)
		if q.Model == "" {
			return errors.New("unknown model"), f.Model
		}
	}
	_, err = q.Resolve()
	for gpus := 4; err != nil && gpus > 0; gpus /= 2 {
		q.GPUs = gpus
		if _, fewer := q.Resolve(); fewer == nil {
			err = nil
		}
	}
	return err, q.Model
}

func TestPublicConfigs(t *testing.T) {
	byFamily := map[string][2]int{}
	for _, c := range publicConfigs(t) {
		err, named := planPublic(c.inRepository(t))
		counts := byFamily[c.family]
		if err == nil {
			counts[0]++
		} else {
			counts[1]++
			var bad *fault.Input
			if errors.As(err, &bad) {
				t.Logf("%s %s %s: %v", c.family, c.name, named, strings.ReplaceAll(bad.What, "\n", " "))
			} else {
				t.Logf("%s %s %s: %v", c.family, c.name, named, err)
			}
		}
		byFamily[c.family] = counts
	}
	for _, family := range slices.Sorted(maps.Keys(byFamily)) {
		fmt.Println(family, byFamily[family])
	}
	_ = update
}
