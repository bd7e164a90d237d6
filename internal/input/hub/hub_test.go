package hub

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// cleanEnvironment hides the caches and the token of the user who runs the test.
func cleanEnvironment(t *testing.T) (folder string) {
	for _, name := range []string{"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
		"HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_ENDPOINT"} {
		t.Setenv(name, "")
	}
	folder = t.TempDir()
	t.Setenv("HF_HOME", filepath.Join(folder, "home"))
	t.Setenv("XDG_CACHE_HOME", filepath.Join(folder, "xdg"))
	return folder
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestCached(t *testing.T) {
	for variable, under := range map[string]string{"HF_HOME": "hub", "HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "",
		"XDG_CACHE_HOME": "huggingface/hub"} {
		t.Run(variable, func(t *testing.T) {
			folder := filepath.Join(cleanEnvironment(t), "here")
			t.Setenv("HF_HOME", "")
			t.Setenv(variable, folder)
			model := filepath.Join(folder, under, "models--some--thing")
			write(t, filepath.Join(model, "snapshots", "aaa", "config.json"), "{}")
			if got, ok := Cached("some/thing"); !ok || filepath.Base(got) != "aaa" {
				t.Errorf("the only snapshot: got %q, %v", got, ok)
			}
			write(t, filepath.Join(model, "snapshots", "bbb", "config.json"), "{}")
			if got, ok := Cached("some/thing"); ok {
				t.Errorf("two snapshots and no branch: got %q", got)
			}
			write(t, filepath.Join(model, "refs", "main"), "bbb\n")
			if got, ok := Cached("some/thing"); !ok || filepath.Base(got) != "bbb" {
				t.Errorf("two snapshots: got %q, %v", got, ok)
			}
			write(t, filepath.Join(model, "refs", "main"), "..")
			if got, ok := Cached("some/thing"); ok {
				t.Errorf("a branch that leads out of the cache: got %q", got)
			}
			for _, name := range []string{"some/other", "thing", "../some/thing", "some/..", "/some/thing"} {
				if got, ok := Cached(name); ok {
					t.Errorf("%s: got %q", name, got)
				}
			}
		})
	}
}

const secret = "hf_secret"

// hubOf is a stand-in for the hub with one open model and one that needs a token.
func hubOf(t *testing.T) (asked *[]string) {
	asked = &[]string{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*asked = append(*asked, r.URL.Path+" "+r.Header.Get("Authorization"))
		switch r.URL.Path {
		case "/some/open/resolve/main/config.json":
			_, _ = w.Write([]byte(`{"model_type": "open"}`))
		case "/some/gated/resolve/main/config.json":
			if r.Header.Get("Authorization") != "Bearer "+secret {
				w.WriteHeader(http.StatusForbidden)
				return
			}
			_, _ = w.Write([]byte(`{"model_type": "gated"}`))
		case "/some/busy/resolve/main/config.json":
			w.WriteHeader(http.StatusServiceUnavailable)
		case "/some/huge/resolve/main/config.json":
			_, _ = w.Write(make([]byte, maxConfig+1))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(server.Close)
	t.Setenv("HF_ENDPOINT", server.URL+"/")
	return asked
}

func TestDownload(t *testing.T) {
	folder := cleanEnvironment(t)
	asked := hubOf(t)
	check := func(name, want string) {
		t.Helper()
		file, err := Download(name)
		got := ""
		if err == nil {
			text, _ := os.ReadFile(file)
			got = string(text)
		} else {
			got = err.Error()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
		if strings.Contains(got, secret) {
			t.Errorf("%s: the token is in %s", name, got)
		}
	}
	check("some/open", "open")
	check("some/gated", "set HF_TOKEN")
	check("some/none", "has no config.json")
	check("some/busy", "status 503")
	check("some/huge", "more than 10000000 bytes")
	t.Setenv("HF_TOKEN", secret)
	check("some/gated", "gated")
	t.Setenv("HF_TOKEN", "")
	write(t, filepath.Join(folder, "home", "token"), secret+"\n")
	check("some/gated", "gated")
	t.Setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
	check("some/gated", "set HF_TOKEN")
	before := len(*asked)
	t.Setenv("HF_HUB_OFFLINE", "1")
	check("some/open", "offline")
	if len(*asked) != before {
		t.Error("the hub was asked although this host is offline")
	}
	t.Setenv("HF_HUB_OFFLINE", "")
	t.Setenv("HF_TOKEN", secret)
	t.Setenv("HF_ENDPOINT", "http://127.0.0.1:1")
	check("some/open", "did not answer")
	t.Setenv("HF_ENDPOINT", "http://[")
	check("some/open", "did not answer")
}

// TestRedirect: the token goes with a redirect to the same server, and to no other, even if the host is the same.
func TestRedirect(t *testing.T) {
	cleanEnvironment(t)
	t.Setenv("HF_TOKEN", secret)
	tokens := map[string]string{}
	answer := func(w http.ResponseWriter, r *http.Request) {
		tokens[r.URL.Path] = r.Header.Get("Authorization")
		_, _ = w.Write([]byte("{}"))
	}
	other := httptest.NewServer(http.HandlerFunc(answer))
	defer other.Close()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/some/renamed/resolve/main/config.json":
			http.Redirect(w, r, "/same", http.StatusTemporaryRedirect)
		case "/some/moved/resolve/main/config.json":
			http.Redirect(w, r, other.URL+"/other", http.StatusFound)
		case "/some/endless/resolve/main/config.json":
			http.Redirect(w, r, r.URL.Path, http.StatusFound)
		default:
			answer(w, r)
		}
	}))
	defer server.Close()
	t.Setenv("HF_ENDPOINT", server.URL)
	for _, name := range []string{"some/renamed", "some/moved"} {
		if _, err := Download(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if tokens["/same"] != "Bearer "+secret || tokens["/other"] != "" {
		t.Errorf("the servers got %v", tokens)
	}
	if _, err := Download("some/endless"); err == nil || !strings.Contains(err.Error(), "did not answer") {
		t.Errorf("redirects without an end: %v", err)
	}
}

func TestIsRepository(t *testing.T) {
	for name, want := range map[string]bool{
		"meta-llama/Llama-3.1-8B": true, "a/b": true, "a/b.c": true, "a/b_c-d": true,
		"a": false, "a/b/c": false, "./a": false, "a/..": false, "a/b..c": false, "a/b--c": false, "a--b/c": false,
		"a/config.json": false, "a/model.safetensors": false, "/a/b": false, "a/": false, "": false,
	} {
		if got := IsRepository(name); got != want {
			t.Errorf("%q: %v, want %v", name, got, want)
		}
	}
}
