// Package hub finds models by the names that the Hugging Face hub has for them,
// such as "Qwen/Qwen2.5-7B": in huggingface_hub's cache on this host, or on the
// hub itself. It respects the variables of huggingface_hub.
package hub

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"plimsoll/fault"
	"plimsoll/files"
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
	timeout    = 20 * time.Second
	maxConfig  = 10_000_000
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

func get(name string) ([]byte, error) {
	endpoint := strings.TrimSuffix(first("HF_ENDPOINT"), "/")
	if endpoint == "" {
		endpoint = "https://huggingface.co"
	}
	unreachable := func(err error) error {
		var detail *url.Error
		if errors.As(err, &detail) { // its text repeats the address
			err = detail.Err
		}
		return &fault.Input{What: fmt.Sprintf("the hub did not answer for %s", name), Err: err,
			Hint: "check the network and HF_ENDPOINT, or name the model's config.json"}
	}
	request, err := http.NewRequest(http.MethodGet, endpoint+"/"+name+"/resolve/main/"+configName, nil)
	if err != nil {
		return nil, unreachable(err)
	}
	if t := token(); t != "" {
		request.Header.Set("Authorization", "Bearer "+t)
	}
	client := http.Client{Timeout: timeout, CheckRedirect: follow}
	response, err := client.Do(request)
	if err != nil {
		return nil, unreachable(err)
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized, http.StatusForbidden:
		return nil, fault.Inputf("the hub does not show the config.json of %s to this user: status %d", name,
			response.StatusCode).WithHint("check the name, accept the model's terms on the hub, and set HF_TOKEN")
	case http.StatusNotFound:
		return nil, fault.Inputf("the hub has no config.json of %s", name).
			WithHint("check the name; a repository without config.json holds no model of transformers")
	default:
		return nil, fault.Inputf("the hub answered for %s with status %d", name, response.StatusCode).
			WithHint("try again later, or name the model's config.json")
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, maxConfig+1))
	switch {
	case err != nil:
		return nil, unreachable(err)
	case len(text) > maxConfig:
		return nil, fault.Inputf("the hub's config.json of %s has more than %d bytes", name, maxConfig).
			WithHint("name the model's config.json")
	}
	return text, nil
}

// follow takes the token from a request that a redirect sends to another server. Go would send it to a subdomain,
// another port and without encryption, too.
func follow(next *http.Request, before []*http.Request) error {
	if len(before) >= 10 {
		return errors.New("it sent the request on ten times")
	}
	if from := before[0].URL; next.URL.Scheme != from.Scheme || next.URL.Host != from.Host {
		next.Header.Del("Authorization")
	}
	return nil
}

// token returns the user's token for the hub, or "".
func token() string {
	switch strings.ToLower(os.Getenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")) {
	case "1", "on", "yes", "true":
		return ""
	}
	if t := first("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"); t != "" {
		return strings.TrimSpace(t)
	}
	file := os.Getenv("HF_TOKEN_PATH")
	if file == "" {
		file = filepath.Join(home(), "token")
	}
	text, err := files.Read(file, maxLine)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
