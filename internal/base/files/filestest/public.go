package filestest

import (
	"encoding/csv"
	"os"
	"path/filepath"
	"testing"
)

// PublicConfig is a configuration of a public project: where it is, its name in the index, the repository that it comes
// from, its kind and its family.
type PublicConfig struct{ Path, Name, Repository, Kind, Family string }

// PublicConfigs returns the configurations in a folder with an INDEX.tsv. Where it is missing, the test is skipped, but
// not in CI.
func PublicConfigs(t testing.TB, folder string) []PublicConfig {
	t.Helper()
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
	var list []PublicConfig
	for _, row := range rows[1:] {
		list = append(list, PublicConfig{filepath.Join(folder, row[0]), row[0], row[1], row[2], row[3]})
	}
	return list
}
