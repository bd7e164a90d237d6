package model

import (
	"embed"
	"fmt"
	"slices"
	"strings"
	"sync"

	"plimsoll/internal/input/recipe/strict"
)

// The catalog holds the sizes that the authors of each model published, as the
// fields of its config.json that the parameters depend on.
//
//go:embed catalog/*.json
var catalog embed.FS

// Catalog returns the sorted names of the models that are known without a file.
// bert-large is the model that is pre-trained (BertForPreTraining): the encoder
// with the heads for masked words and for the next sentence.
func Catalog() []string { return slices.Clone(catalogNames()) }

// catalogNames are read once: several flags of each command complete them.
var catalogNames = sync.OnceValue(func() []string {
	entries, err := catalog.ReadDir("catalog")
	if err != nil {
		panic(err) // the folder is embedded
	}
	names := []string{}
	for _, entry := range entries {
		names = append(names, strings.TrimSuffix(entry.Name(), ".json"))
	}
	slices.Sort(names)
	return names
})

// CatalogArchitecture returns the architecture of a model of the catalog, without the time that it takes to describe
// the model.
func CatalogArchitecture(name string) (string, error) {
	text, known := catalogConfig(name)
	if !known {
		return "", fmt.Errorf("the catalog has no model %q", name)
	}
	doc, err := strict.ParseJSON(name+".json", text)
	if err != nil {
		return "", err
	}
	c, err := newConfig(doc)
	if err != nil {
		return "", err
	}
	a, err := unlessRefused(c.architecture)
	return a.name, err
}

// CatalogConfig returns the config.json of a model of the catalog.
func CatalogConfig(name string) ([]byte, bool) { return catalogConfig(name) }

func catalogConfig(name string) ([]byte, bool) {
	text, err := catalog.ReadFile("catalog/" + name + ".json")
	return text, err == nil
}
