package releases

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

// written are documents of each kind, with the releases that they say.
var written = map[string]struct {
	text      string
	all, open map[string]string
}{
	"requirements.txt": {"# pinned\n--extra-index-url https://download.pytorch.org/whl/cu124\ntorch==2.6.0+cu124 \\\n" +
		"    --hash=sha256:00\nTransformers[torch]==4.51.3 ; python_version >= '3.9'\naccelerate>=1.0,<2\n" +
		"flash_attn @ https://x/y.whl\ndeepspeed\npeft==0.15.*\n-r other.txt\n-e .\n",
		map[string]string{"torch": "2.6.0+cu124", "transformers": "4.51.3"},
		map[string]string{"accelerate": ">=1.0,<2", "flash-attn": "@ https://x/y.whl", "deepspeed": "",
			"peft": "==0.15.*"}},
	"freeze.txt": {"accelerate==1.6.0\nbitsandbytes==0.45.5\nnvidia-nccl-cu12==2.21.5\n-e git+https://x#egg=y\n",
		map[string]string{"accelerate": "1.6.0", "bitsandbytes": "0.45.5", "nvidia-nccl-cu12": "2.21.5"}, nil},
	"list.txt": {"Package      Version\n------------ -------\ntorch        2.9.1\ntrl          0.24.0\n",
		map[string]string{"torch": "2.9.1", "trl": "0.24.0"}, nil},
	"environment.yml": {"name: train\ndependencies:\n  - python=3.11\n  - pytorch=2.5.1=py3.11_cuda12.4\n  - pip:\n" +
		"    - trl==0.12.1\n", map[string]string{"torch": "2.5.1", "python": "3.11", "trl": "0.12.1"}, nil},
	"uv.lock": {"version = 1\n\n[[package]]\nname = \"torch\"\nversion = \"2.8.0\"\nsource = { registry = \"x\" }\n\n" +
		"[[package]]\nname = \"triton\"\nversion = \"3.2.0\"\n\n" +
		"[[package]]\nname = \"triton\"\nversion = \"3.4.0\"\n\n" +
		"[[package]]\nname = \"mine\"\nsource = { virtual = \".\" }\n",
		map[string]string{"torch": "2.8.0"}, map[string]string{"triton": "3.2.0 and 3.4.0"}},
}

func TestRead(t *testing.T) {
	for name, want := range written {
		f, err := Read(name, files.Texts{name: []byte(want.text)})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		compare(t, name, f.All, want.all)
		if want.open != nil {
			compare(t, name+", open", f.Open, want.open)
		}
	}
	f, err := Read("uv.lock", files.Texts{"uv.lock": []byte(written["uv.lock"].text)})
	if torch, is := f.Of("torch"); err != nil || !is || torch.Place.Line != 5 {
		t.Errorf("%+v, %v", torch, err)
	}
}

func compare(t *testing.T, name string, got map[string]Release, want map[string]string) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %v, want %v", name, got, want)
	}
	for program, release := range want {
		if got[program].Version != release {
			t.Errorf("%s: %s is %q, want %q", name, program, got[program].Version, release)
		}
	}
}

// TestFolder reads an environment, as a whole or by its folder of packages.
func TestFolder(t *testing.T) {
	root := t.TempDir()
	packages := filepath.Join(root, "lib", "python3.11", "site-packages")
	for _, name := range []string{"torch-2.15.0+cu132.dist-info", "flash_attn-2.8.3.dist-info", "torch",
		"x.dist-info"} {
		if err := os.MkdirAll(filepath.Join(packages, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{root, packages} {
		f, err := Read(path, nil)
		if err != nil {
			t.Fatal(err)
		}
		compare(t, path, f.All, map[string]string{"torch": "2.15.0+cu132", "flash-attn": "2.8.3"})
	}
}

func TestRefused(t *testing.T) {
	for name, text := range map[string]string{"empty.txt": "", "prose.txt": "1. a list\n2. of lines\n"} {
		if _, err := Read(name, files.Texts{name: []byte(text)}); !errors.As(err, new(*fault.Input)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Read(t.TempDir(), nil); !errors.As(err, new(*fault.Input)) {
		t.Error(err)
	}
}

func FuzzRead(f *testing.F) {
	for _, seed := range written {
		f.Add(seed.text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		found, err := Read("x", files.Texts{"x": []byte(text)})
		if err != nil && !errors.As(err, new(*fault.Input)) {
			t.Errorf("%q: %v", text, err)
		}
		if found != nil && found.All[""].Version != "" {
			t.Errorf("%q has a package without a name", text)
		}
	})
}
