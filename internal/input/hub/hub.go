// Package hub finds models by the names that the Hugging Face hub has for them,
// such as "Qwen/Qwen2.5-7B": in huggingface_hub's cache on this host, or on the
// hub itself. It respects the variables of huggingface_hub.
package hub

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

var repository = regexp.MustCompile(`^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$`)

var commit = regexp.MustCompile(`^[0-9a-f]+$`)

// IsRepository reports whether a name can be that of a repository on the hub, and
// is not that of a file.
func IsRepository(name string) bool {
	extension := filepath.Ext(name)
	return repository.MatchString(name) && !strings.Contains(name, "..") && !strings.Contains(name, "--") &&
		extension != ".json" && extension != ".safetensors"
}

// first returns the value of the first variable that is set and not empty.
func first(names ...string) string {
	for _, name := range names {
		if value := os.Getenv(name); value != "" {
			return value
		}
	}
	return ""
}

// home returns the folder of huggingface_hub, or "" where the user has none.
func home() string {
	if folder := os.Getenv("HF_HOME"); folder != "" {
		return folder
	}
	if caches := os.Getenv("XDG_CACHE_HOME"); caches != "" {
		return filepath.Join(caches, "huggingface")
	}
	if user, err := os.UserHomeDir(); err == nil {
		return filepath.Join(user, ".cache", "huggingface")
	}
	return ""
}

// folderOf returns the folder of a repository among others.
func folderOf(caches, name string) string {
	return filepath.Join(caches, "models--"+strings.ReplaceAll(name, "/", "--"))
}

// Cached returns the folder in huggingface_hub's cache that holds the files of a
// repository: the snapshot of its branch main, or the only snapshot.
func Cached(name string) (folder string, ok bool) {
	caches := first("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
	if caches == "" && home() != "" {
		caches = filepath.Join(home(), "hub")
	}
	if caches == "" || !IsRepository(name) {
		return "", false
	}
	snapshots := filepath.Join(folderOf(caches, name), "snapshots")
	if revision, err := files.Read(filepath.Join(folderOf(caches, name), "refs", "main"), maxLine); err == nil {
		if !commit.MatchString(strings.TrimSpace(string(revision))) {
			return "", false
		}
		folder = filepath.Join(snapshots, strings.TrimSpace(string(revision)))
		info, err := os.Stat(folder)
		return folder, err == nil && info.IsDir()
	}
	entries, err := os.ReadDir(snapshots)
	if err != nil || len(entries) != 1 {
		return "", false
	}
	return filepath.Join(snapshots, entries[0].Name()), true
}

const (
	configName = "config.json"
	maxLine    = 10_000 // bytes of a file that holds a token or a commit
)

// Download asks the hub for the config.json of a repository and returns the
// file that holds it, in a cache of its own. An error never has the token.
func Download(name string) (file string, err error) {
	refused := fault.Inputf("the hub was not asked for %s", name)
	switch offline := strings.ToLower(first("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")); offline {
	case "1", "on", "yes", "true":
		return "", refused.WithHint("HF_HUB_OFFLINE says that this host is offline: unset it, or leave --online out")
	}
	text, err := get(name)
	if err != nil {
		return "", err
	}
	caches, err := os.UserCacheDir()
	if err != nil {
		refused.Err = err
		return "", refused.WithHint("set XDG_CACHE_HOME to a folder that can be written")
	}
	folder := folderOf(filepath.Join(caches, "plimsoll", "hub"), name)
	file = filepath.Join(folder, configName)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", unwritten(file, err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return "", unwritten(file, err)
	}
	return file, nil
}

func unwritten(file string, err error) error {
	return &fault.Input{Where: fault.File(file), What: "cannot be written", Err: err,
		Hint: "set XDG_CACHE_HOME to a folder that can be written"}
}
