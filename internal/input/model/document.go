package model

import (
	"path/filepath"

	"plimsoll/internal/input/hub"
	"plimsoll/internal/input/recipe/strict"
)

// Described returns the config.json of a model: of the catalog, of a path, or of huggingface_hub's cache on this host.
// Programs that make a model of their own from it read their sizes there.
func Described(nameOrPath string) (*strict.Document, error) {
	name := nameOrPath
	if known, ok := fromAuthors(name); ok && !exists(name) {
		name = known
	}
	if text, ok := catalogConfig(name); ok {
		return strict.ParseJSON(name+".json", text)
	}
	if exists(name) && filepath.Ext(name) == ".json" {
		return readDocument(name)
	}
	if file := filepath.Join(name, configName); exists(file) {
		return readDocument(file)
	}
	if folder, ok := hub.Cached(name); ok && exists(filepath.Join(folder, configName)) {
		return readDocument(filepath.Join(folder, configName))
	}
	return nil, unknownName(nameOrPath, false)
}

// DescribedAbsent returns the configuration of the model of the catalog that a path names in full by its last folder,
// and the model's name, where the path is not on this host. It returns nil for others.
func DescribedAbsent(file string) (config *strict.Document, known string) {
	known, c := ofFolder(file)
	if c == nil || exists(file) {
		return nil, ""
	}
	config, err := Described(known)
	if err != nil {
		return nil, ""
	}
	return config, known
}
